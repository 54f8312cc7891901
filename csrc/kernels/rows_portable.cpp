#include "rows-inl.h"

namespace laconic {

const RowsKernels kRowsPortable = kRowsKernels;

}  // namespace laconic
