// Part of rows.inl: the activation of MoeSwiGlu and its gradient, by vectors of the wide type.

// exp(x), within 2 ulp: 2^n exp(rest), rest in [-ln 2 / 2, ln 2 / 2] by the polynomial of Cephes' expf. NaN stays NaN.
// The same operations at every width, none contracted: the same bits.
inline Floats exponential(Floats x) {
  // Below, the sum of 1 and it is 1; above, it is infinite.
  const Floats low = Floats{} - 87.0f, high = Floats{} + 89.0f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  // Adding 1.5 * 2^23 rounds to a whole number, which then stands in the last bits.
  const Floats round = Floats{} + 12582912.0f;
  const Floats shifted = x * 1.44269504088896341f + round;
  const Floats n = shifted - round;
  const Floats rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats y = Floats{} + 1.9875691500e-4f;
  y = y * rest + 1.3981999507e-3f;
  y = y * rest + 8.3334519073e-3f;
  y = y * rest + 4.1665795894e-2f;
  y = y * rest + 1.6666665459e-1f;
  y = y * rest + 5.0000001201e-1f;
  y = (y * (rest * rest) + rest) + 1.0f;
  // 2^(n - 1), whose exponent fits where that of 2^128 does not, and twice.
  const Words power = ((Words)shifted - 0x4b400000u + 126u) << 23;
  return y * (Floats)power * 2.0f;
}

inline Doubles exponential(Doubles x) {  // for validation only
  for (int i = 0; i < kFloats / 2; ++i) x[i] = std::exp(x[i]);
  return x;
}

template <typename V>
inline V swi_glu_of(V gate, V up) {
  return gate / (exponential(-gate) + 1) * up;
}

template <typename V>
struct GateAndUp {
  V gate, up;
};

template <typename V>
inline GateAndUp<V> swi_glu_grad_of(V grad, V gate, V up) {
  const V s = 1 / (exponential(-gate) + 1);
  return {(grad * up) * (s * (gate / (exponential(gate) + 1) + 1)), grad * (gate * s)};
}

// A vector, of which the first `count` elements are those of a row's end.
template <typename T>
typename Vector<T>::type load_part(const T* in, std::size_t count) {
  T part[Vector<T>::size] = {};
  std::copy_n(in, count, part);
  return load(part);
}

template <typename T, typename V>
void store_part(T* out, V value, std::size_t count) {
  T part[Vector<T>::size];
  store(part, value);
  std::copy_n(part, count, out);
}

template <typename T>
void swi_glu(T* out, const T* gate, const T* up, std::size_t width) {
  constexpr std::size_t size = Vector<T>::size;
  std::size_t i = 0;
  for (; i + size <= width; i += size) store(out + i, swi_glu_of(load(gate + i), load(up + i)));
  const std::size_t rest = width - i;
  if (rest) store_part(out + i, swi_glu_of(load_part(gate + i, rest), load_part(up + i, rest)), rest);
}

template <typename T>
void swi_glu_grad(T* of_gate, T* of_up, const T* grad, const T* gate, const T* up, std::size_t width) {
  constexpr std::size_t size = Vector<T>::size;
  std::size_t i = 0;
  for (; i + size <= width; i += size) {
    const auto made = swi_glu_grad_of(load(grad + i), load(gate + i), load(up + i));
    store(of_gate + i, made.gate);
    store(of_up + i, made.up);
  }
  const std::size_t rest = width - i;
  if (rest == 0) return;
  const auto made = swi_glu_grad_of(load_part(grad + i, rest), load_part(gate + i, rest), load_part(up + i, rest));
  store_part(of_gate + i, made.gate, rest);
  store_part(of_up + i, made.up, rest);
}
