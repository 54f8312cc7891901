#include "gated-inl.h"
#include "simd_avx2-inl.h"

namespace laconic {

const GatedKernels kGatedAvx2 = {gated<Avx2>};

}  // namespace laconic
