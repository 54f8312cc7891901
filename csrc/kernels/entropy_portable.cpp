#include "entropy-inl.h"

namespace laconic {

const EntropyKernels kEntropyPortable = kEntropyKernels;

}  // namespace laconic
