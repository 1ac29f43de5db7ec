// Runs the native kernels under a runtime that is made up here: no onnxruntime, so that a sanitizer sees the whole
// program, and calls can be made that onnxruntime would refuse before the library sees them.
//
//   driver CASES RESULTS THREADS...
//
// reads calls from CASES (tests/native_driver.py writes it), makes each of them at each number of threads, and
// writes what came of it: what shape inference says, and the outputs' bytes or the words of the error. Bits that
// depend on the number of threads, and inputs that were written to, are errors found here.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "fake_runtime.h"

using namespace moe;

extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base);

namespace {

class Reader {
 public:
  explicit Reader(const char* path) : file_(path, std::ios::binary) {}
  int64_t number() {
    int64_t value = 0;
    file_.read(reinterpret_cast<char*>(&value), sizeof value);
    return value;
  }
  std::string text() {
    std::string value(size_t(number()), '\0');
    file_.read(&value[0], std::streamsize(value.size()));
    return value;
  }
  std::vector<int64_t> numbers() {
    std::vector<int64_t> values(static_cast<size_t>(number()));
    for (int64_t& value : values) value = number();
    return values;
  }

 private:
  std::ifstream file_;
};

class Writer {
 public:
  explicit Writer(const char* path) : file_(path, std::ios::binary) {}
  void number(int64_t value) { file_.write(reinterpret_cast<const char*>(&value), sizeof value); }
  void text(const std::string& value) {
    number(int64_t(value.size()));
    file_.write(value.data(), std::streamsize(value.size()));
  }
  void info(const OrtTensorTypeAndShapeInfo& info) {
    number(int64_t(info.type));
    number(int64_t(info.dims.size()));
    for (int64_t dim : info.dims) number(dim);
  }
  void flush() { file_.flush(); }

 private:
  std::ofstream file_;
};

std::string words(OrtStatus* status) {
  std::string text = status == nullptr ? "" : status->text;
  delete status;
  return text;
}

using Values = std::vector<std::unique_ptr<OrtValue>>;

std::string run_once(const OrtCustomOp& op, void* kernel, OrtKernelContext& context, const Values& inputs) {
  context.inputs.clear();
  for (const auto& input : inputs) context.inputs.push_back(input.get());
  context.outputs = Values(context.wanted.size());
  std::vector<std::string> before;
  for (const auto& input : inputs) before.push_back(input ? std::string(input->data, input->bytes) : "");
  std::string text = words(op.KernelComputeV2(kernel, &context));
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i] && before[i] != std::string(inputs[i]->data, inputs[i]->bytes)) text = "an input was written to";
  }
  for (size_t i = 0; text.empty() && i < context.wanted.size(); ++i) {
    if (context.wanted[i] && !context.outputs[i]) text = "an output was not made";
  }
  return text;
}

bool same(const Values& a, const Values& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i] != !b[i]) return false;
    if (a[i] && (a[i]->info.dims != b[i]->info.dims ||
                 std::string(a[i]->data, a[i]->bytes) != std::string(b[i]->data, b[i]->bytes))) {
      return false;
    }
  }
  return true;
}

void run_case(Reader& in, Writer& out, const std::vector<size_t>& threads) {
  const std::string name = in.text();
  fake::empty_is_null = in.number() != 0;
  OrtKernelInfo node;
  for (int64_t left = in.number(); left > 0; --left) {
    const std::string attribute = in.text();
    node.attributes[attribute].is_list = in.number() != 0;
    node.attributes[attribute].values = in.numbers();
  }
  Values inputs;
  OrtShapeInferContext known{&node, {}, {}}, types{&node, {}, {}};
  for (int64_t left = in.number(); left > 0; --left) {
    inputs.emplace_back();
    known.inputs.emplace_back();
    types.inputs.emplace_back();
    if (in.number() == 0) continue;
    inputs.back() = std::make_unique<OrtValue>();
    OrtValue& value = *inputs.back();
    value.info.type = Type(in.number());
    value.info.dims = in.numbers();
    fake::allocate(value);
    const std::string data = in.text();
    if (!data.empty()) std::memcpy(value.data, data.data(), data.size());
    types.inputs.back().type = known.inputs.back().type = value.info.type;
    known.inputs.back().dims = in.numbers();
    for (size_t i = 0; i < known.inputs.back().dims.size(); ++i) known.inputs.back().names.push_back(in.text());
  }
  std::vector<char> wanted;
  for (int64_t one : in.numbers()) wanted.push_back(one != 0);

  const OrtCustomOp* op = nullptr;
  for (const OrtCustomOp* one : fake::registered->ops) {
    if (name == one->GetName(one)) op = one;
  }
  if (op == nullptr) {
    std::fprintf(stderr, "the library has no operator %s\n", name.c_str());
    std::exit(2);
  }
  known.outputs.resize(op->GetOutputTypeCount(op));
  types.outputs.resize(known.outputs.size());
  out.text(words(op->InferOutputShapeFn(op, &known)));
  out.number(int64_t(known.outputs.size()));
  for (const auto& output : known.outputs) out.info(output);
  // As in a model whose sizes are not known: wherever inference stops, the kernel is run. What it does not set is of
  // the type of the last input that may be of any.
  Type guess = Type::undefined;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i] && op->GetInputType(op, i) == Type::undefined) guess = inputs[i]->info.type;
  }
  for (size_t i = 0; i < types.outputs.size(); ++i) {
    const Type type = op->GetOutputType(op, i);
    types.outputs[i].type = type == Type::undefined ? guess : type;
  }
  const std::vector<OrtTensorTypeAndShapeInfo> guessed = types.outputs;
  words(op->InferOutputShapeFn(op, &types));
  for (size_t i = 0; i < guessed.size(); ++i) {
    if (types.outputs[i].type == Type::undefined) types.outputs[i].type = guessed[i].type;
  }

  void* kernel = nullptr;
  std::string text = words(op->CreateKernelV2(op, nullptr, &node, &kernel));
  OrtKernelContext first;
  for (size_t i = 0; text.empty() && i < threads.size(); ++i) {
    OrtKernelContext context;
    context.wanted = wanted;
    for (const auto& output : types.outputs) context.types.push_back(output.type);
    context.threads = threads[i];
    context.fill = 0xa5 + int(i);
    const std::string found = run_once(*op, kernel, context, inputs);
    if (i == 0) {
      first = std::move(context);
      if (!found.empty()) text = found;
    } else if (!found.empty() || !same(first.outputs, context.outputs)) {
      text = "another result at " + std::to_string(threads[i]) + " threads: " + found;
    }
  }
  if (kernel != nullptr) op->KernelDestroy(kernel);
  out.text(text);
  if (!text.empty()) first.outputs.clear();
  out.number(int64_t(first.outputs.size()));
  for (const auto& output : first.outputs) {
    out.number(output != nullptr);
    if (!output) continue;
    out.info(output->info);
    out.text(std::string(output->data, output->bytes));
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) return 2;
  OrtSessionOptions options;
  const std::string refused = words(RegisterCustomOps(&options, &fake::base));
  if (!refused.empty()) {
    std::fprintf(stderr, "%s\n", refused.c_str());
    return 2;
  }
  std::vector<size_t> threads;
  for (int i = 3; i < count; ++i) threads.push_back(size_t(std::atoi(arguments[i])));
  Reader in(arguments[1]);
  Writer out(arguments[2]);
  for (int64_t left = in.number(); left > 0; --left) {
    run_case(in, out, threads);
    out.flush();  // so that the number of results tells which case ended the process
  }
  delete fake::registered;
  return 0;
}
