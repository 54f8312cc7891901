#include "adamw_avx512-inl.h"

namespace laconic {

const AdamWKernels kAdamWAvx512 = kAdamWKernels<Avx512Codes>;

}  // namespace laconic
