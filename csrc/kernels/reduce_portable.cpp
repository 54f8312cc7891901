#include "reduce-inl.h"

namespace laconic {

const ReduceKernels kReducePortable = kReduceKernels<Portable>;

}  // namespace laconic
