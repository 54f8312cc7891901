#include "rows-inl.h"

namespace laconic {

const RowsKernels kRowsPortable = {sum_rows};

}  // namespace laconic
