#include "reduce-inl.h"
#include "simd_avx2-inl.h"

namespace laconic {

const ReduceKernels kReduceAvx2 = kReduceKernels<Avx2>;

}  // namespace laconic
