#define MOE_ROWS rows_avx512
#include "rows.inl"
