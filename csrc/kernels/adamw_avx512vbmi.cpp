#include "adamw_avx512-inl.h"

namespace laconic {

const AdamWKernels kAdamWAvx512Vbmi = kAdamWKernels<Avx512Codes>;

}  // namespace laconic
