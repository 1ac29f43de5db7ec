#define MOE_ROWS rows_avx2
#include "rows.inl"
