#include "rows-inl.h"

namespace laconic {

const RowsKernels kRowsAvx512 = {sum_rows};

}  // namespace laconic
