// Part of rows.inl: the sum of squares in double precision, where those of floats are exact.
//
// Sixteen interleaved sums in a fixed tree, whatever the width of vectors.

typedef float Quarter __attribute__((vector_size(kBytes / 2)));  // as many floats as a vector has doubles

inline Doubles load_doubles(const double* in) { return load(in); }
inline Doubles load_doubles(const float* in) {
  Quarter out;
  std::memcpy(&out, in, sizeof out);
  return __builtin_convertvector(out, Doubles);
}

template <typename T>
double square_sum(const T* in, std::size_t count) {
  constexpr int lanes = 16, size = kFloats / 2;
  Doubles total[lanes / size] = {};
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    for (int j = 0; j < lanes / size; ++j) {
      const Doubles value = load_doubles(in + i + j * size);
      total[j] += value * value;
    }
  }
  double sums[lanes];
  std::memcpy(sums, total, sizeof sums);
  for (std::size_t lane = 0; i < count; ++i, ++lane) sums[lane] += double(in[i]) * double(in[i]);
  return fold<lanes>(sums);
}
