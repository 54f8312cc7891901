#include "linear-inl.h"
#include "simd_avx2-inl.h"

namespace laconic {

const LinearKernels kLinearAvx2 = {linear<Avx2>};

}  // namespace laconic
