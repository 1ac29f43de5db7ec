// MoeSwiGluGrad: the gradient of MoeSwiGlu with respect to both halves of each row, see card.md beside this file.

#include "../native/operator.h"

namespace moe {
namespace {

constexpr const char* kName = "MoeSwiGluGrad";
enum Input { kGrad, kX };

void mixes(const Infos& inputs) { require_same_dtype(kName, "grad_y", inputs[kGrad], "x", inputs[kX]); }

Infos shapes(const Infos& inputs, const Attributes&) {
  Axes axes(kName);
  axes.read({{"grad_y", inputs[kGrad], "N F"}, {"x", inputs[kX], "N G"}});
  axes.bind('F', axes.divide('G', 2, "2"), "half of axis G of 'x'");
  const Type type = inputs[kX].type == Type::undefined ? inputs[kGrad].type : inputs[kX].type;
  const bool unknown = !axes['G'].known() && axes['G'].name.empty();
  const Dim both = unknown && axes['F'].known() ? Dim(2 * axes['F'].value) : axes['G'];
  return {TensorInfo(type, {axes['N'], both})};
}

template <typename T>
void run(Call& call) {
  const std::vector<std::int64_t> shape = call.output_shape(0);
  const std::int64_t width = shape[1] / 2;
  T* const grad_x = call.output<T>(0, shape);
  if (grad_x == nullptr || shape[0] * width == 0) return;
  const T *const grad_y = call.input<T>(kGrad), *const x = call.input<T>(kX);
  call.parallel(shape[0], width * 5 * std::int64_t(sizeof(T)), [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const T* const gate = x + row * 2 * width;
      T* const of_gate = grad_x + row * 2 * width;
      rows_of<T>().swi_glu_grad(of_gate, of_gate + width, grad_y + row * width, gate, gate + width,
                                std::size_t(width));
    }
  });
}

void compute(Call& call) {
  for_float(call.info(kX).type, [&](auto zero) { run<decltype(zero)>(call); });
}

}  // namespace

extern const Spec moe_swi_glu_grad = {
    kName, {{"grad_y", "N F"}, {"x", "N G"}}, {{"grad_x", "N G"}}, {}, shapes, compute, nullptr, mixes};

}  // namespace moe
