// MoeSwiGlu: SiLU of the first half of each row times the second, see card.md beside this file.

#include "../native/operator.h"

namespace moe {
namespace {

constexpr const char* kName = "MoeSwiGlu";
enum Input { kX };

Infos shapes(const Infos& inputs, const Attributes&) {
  Axes axes(kName);
  axes.read({{"x", inputs[kX], "N G"}});
  axes.bind('F', axes.divide('G', 2, "2"), "half of axis G of 'x'");
  return {TensorInfo(inputs[kX].type, {axes['N'], axes['F']})};
}

template <typename T>
void run(Call& call) {
  const std::vector<std::int64_t> shape = call.output_shape(0);
  const std::int64_t width = shape[1];
  T* const y = call.output<T>(0, shape);
  if (y == nullptr || shape[0] * width == 0) return;
  const T* const x = call.input<T>(kX);
  call.parallel(shape[0], width * 3 * std::int64_t(sizeof(T)), [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const T* const gate = x + row * 2 * width;
      rows_of<T>().swi_glu(y + row * width, gate, gate + width, std::size_t(width));
    }
  });
}

void compute(Call& call) {
  for_float(call.info(kX).type, [&](auto zero) { run<decltype(zero)>(call); });
}

}  // namespace

extern const Spec moe_swi_glu = {kName, {{"x", "N G"}}, {{"y", "N F"}}, {}, shapes, compute};

}  // namespace moe
