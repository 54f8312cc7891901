#include "reduce-inl.h"

namespace laconic {

const ReduceKernels kReducePortable = {sum<Portable>};

}  // namespace laconic
