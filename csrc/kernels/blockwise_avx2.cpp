#include "blockwise-inl.h"
#include "simd_avx2-inl.h"

namespace laconic {

const BlockwiseKernels kBlockwiseAvx2 = kBlockwiseKernels<Avx2>;

}  // namespace laconic
