#include "entropy-inl.h"

namespace laconic {

const EntropyKernels kEntropyAvx2 = kEntropyKernels;

}  // namespace laconic
