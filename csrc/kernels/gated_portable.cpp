#include "gated-inl.h"

namespace laconic {

const GatedKernels kGatedPortable = {gated<Portable>};

}  // namespace laconic
