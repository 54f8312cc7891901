#include "accumulate-inl.h"
#include "simd_avx2-inl.h"

namespace laconic {

const AccumulateKernels kAccumulateAvx2 = {accumulate<Avx2>, square_sum};

}  // namespace laconic
