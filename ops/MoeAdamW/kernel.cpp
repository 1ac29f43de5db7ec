// MoeAdamW: parameter and moments after an update by AdamW, in one pass, see card.md beside this file.

#include "../native/operator.h"

namespace moe {
namespace {

constexpr const char* kName = "MoeAdamW";
enum Input { kParameter, kGradient, kAvg, kAvgSq, kFactors };
constexpr std::int64_t kNumFactors = 7;
// Parts begin at whole cache lines, so that no two threads write to one.
constexpr std::int64_t kBlock = 1024;

void mixes(const Infos& inputs) {
  const char* const names[] = {"gradient", "exp_avg", "exp_avg_sq", "factors"};
  for (std::size_t i = 0; i < 4; ++i) {
    require_same_dtype(kName, "parameter", inputs[kParameter], names[i], inputs[i + 1]);
  }
}

Infos shapes(const Infos& inputs, const Attributes&) {
  Axes axes(kName);
  axes.bind('S', kNumFactors, "the operator: beta1, weight1, beta2, weight2, rate, eps, kept");
  axes.read({{"parameter", inputs[kParameter], kAny},
             {"gradient", inputs[kGradient], kAny},
             {"exp_avg", inputs[kAvg], kAny},
             {"exp_avg_sq", inputs[kAvgSq], kAny},
             {"factors", inputs[kFactors], "S"}});
  Type type = Type::undefined;
  for (const TensorInfo& one : inputs) type = type == Type::undefined ? one.type : type;
  return Infos(3, axes.any_shape(type));
}

// Outputs may be bound to the memory of the inputs of their names: an element is written after it was read, and by
// the thread that read it.
template <typename T>
void run(Call& call, AdamWStep<T> step) {
  const T* const f = call.input<T>(kFactors);
  const AdamW<T> by = {f[0], f[1], f[2], f[3], f[4], f[5], f[6]};
  T* out[3];
  for (std::size_t i = 0; i < 3; ++i) out[i] = call.output<T>(i, call.output_shape(i));
  const std::int64_t count = call.elements(kParameter);
  const T *const parameter = call.input<T>(kParameter), *const gradient = call.input<T>(kGradient);
  const T *const avg = call.input<T>(kAvg), *const avg_sq = call.input<T>(kAvgSq);
  if (count == 0) return;
  call.parallel((count + kBlock - 1) / kBlock, kBlock * 7 * std::int64_t(sizeof(T)),
                [&](std::int64_t begin, std::int64_t end) {
                  const std::int64_t at = begin * kBlock, size = std::min(count, end * kBlock) - at;
                  T* const here[3] = {out[0] == nullptr ? nullptr : out[0] + at,
                                      out[1] == nullptr ? nullptr : out[1] + at,
                                      out[2] == nullptr ? nullptr : out[2] + at};
                  step(by, here, parameter + at, gradient + at, avg + at, avg_sq + at, std::size_t(size));
                });
}

void compute(Call& call) {
  if (call.info(kParameter).type == Type::float64) return run<double>(call, row_table().adam_w_f64);
  run<float>(call, row_table().adam_w_f32);
}

}  // namespace

extern const Spec moe_adam_w = {
    kName,
    {{"parameter", kAny, Kind::masters},
     {"gradient", kAny, Kind::masters},
     {"exp_avg", kAny, Kind::masters},
     {"exp_avg_sq", kAny, Kind::masters},
     {"factors", "S", Kind::masters}},
    {{"parameter_updated", kAny, Kind::masters},
     {"exp_avg_updated", kAny, Kind::masters},
     {"exp_avg_sq_updated", kAny, Kind::masters}},
    {},
    shapes,
    compute,
    nullptr,
    mixes,
};

}  // namespace moe
