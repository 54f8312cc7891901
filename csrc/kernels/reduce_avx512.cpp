#include "reduce-inl.h"
#include "simd_avx512-inl.h"

namespace laconic {

const ReduceKernels kReduceAvx512 = kReduceKernels<Avx512>;

}  // namespace laconic
