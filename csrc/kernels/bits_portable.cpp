#include "bits-inl.h"

namespace laconic {

const BitsKernels kBitsPortable = {pack_bits<PlainBits>, unpack_bits<PlainBits>,
                                   select_bits<PlainBits>};

}  // namespace laconic
