#include "norms-inl.h"

namespace laconic {

const NormKernels kNormsAvx512 = {norms};

}  // namespace laconic
