#include "isa.h"

namespace laconic {

const std::vector<Isa>& supported_isas() {
  static const std::vector<Isa> isas = [] {
    std::vector<Isa> found = {{"portable", &kBlockwisePortable, &kAccumulatePortable,
                               &kReducePortable, &kAdamWPortable, &kLosslessPortable,
                               &kRowsPortable, &kGatedPortable, &kLinearPortable, &kBitsPortable,
                               &kNormPortable, &kEntropyPortable}};
#ifdef LACONIC_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                      __builtin_cpu_supports("popcnt");
    const EntropyKernels* const entropy =
        __builtin_cpu_supports("bmi2") ? &kEntropyAvx2 : &kEntropyPortable;
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq");
    if (avx2) {
      found.push_back({"avx2", &kBlockwiseAvx2, &kAccumulateAvx2, &kReduceAvx2, &kAdamWAvx2,
                       &kLosslessAvx2, &kRowsAvx2, &kGatedAvx2, &kLinearAvx2, &kBitsAvx2,
                       &kNormAvx2, entropy});
    }
    const bool vbmi2 = __builtin_cpu_supports("avx512vbmi") &&
                       __builtin_cpu_supports("avx512vbmi2") &&
                       __builtin_cpu_supports("avx512vpopcntdq");
    if (avx512) {
      found.push_back({"avx512", &kBlockwiseAvx512, &kAccumulateAvx512, &kReduceAvx512,
                       vbmi2 ? &kAdamWAvx512Vbmi : &kAdamWAvx512,
                       vbmi2 ? &kLosslessAvx512 : &kLosslessAvx2, &kRowsAvx512, &kGatedAvx512,
                       &kLinearAvx512, &kBitsAvx512, &kNormAvx512, entropy});
    }
#endif
    return found;
  }();
  return isas;
}

}  // namespace laconic
