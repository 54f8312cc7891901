#include "accumulate-inl.h"
#include "simd_avx2-inl.h"

namespace laconic {

const AccumulateKernels kAccumulateAvx2 = kAccumulateKernels<Avx2>;

}  // namespace laconic
