#include "accumulate-inl.h"
#include "simd_avx2-inl.h"
#include "simd_avx512-inl.h"

namespace laconic {

const AccumulateKernels kAccumulateAvx512 = kAccumulateKernels<Avx512>;

}  // namespace laconic
