#define MOE_ROWS rows_baseline
#include "rows.inl"
