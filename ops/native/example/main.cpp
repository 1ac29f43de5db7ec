// The operators without Python: an ONNX model with a MoeInitRoutingV2Grad node, run through onnxruntime's C API.
//
//   c++ -std=c++17 -I ops/native ops/native/example/main.cpp -o example -ldl
//   ./example libonnxruntime.so libascend_moe.so model.onnx
//
// With onnxruntime's own header the names below are there already; README.md shows that form. This file needs no
// header but ort_abi.h, so that it can be built anywhere. The model takes grad_expanded_x, float32 [N, H], and
// expanded_row_idx, int32 [N], and gives grad_x, float32 [T, H].

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "ort_abi.h"

namespace {

using namespace moe;

struct OrtEnv;
struct OrtSession;
struct OrtRunOptions;
using Path = std::filesystem::path;
using Letter = Path::value_type;  // wchar_t on Windows

// Functions of the C API by slot, as in ort_abi.h: what a program needs and a library of operators does not.
#define EXAMPLE_FUNCTIONS(NAME)                                                                                  \
  NAME(CreateEnv, 3, OrtStatus*, (int level, const char* name, OrtEnv** out))                                    \
  NAME(ReleaseEnv, 92, void, (OrtEnv* env))                                                                      \
  NAME(CreateSessionOptions, 10, OrtStatus*, (OrtSessionOptions** out))                                          \
  NAME(ReleaseSessionOptions, 100, void, (OrtSessionOptions* options))                                           \
  NAME(RegisterCustomOpsLibrary_V2, 228, OrtStatus*, (OrtSessionOptions* options, const Letter* path))           \
  NAME(CreateSession, 7, OrtStatus*,                                                                             \
       (const OrtEnv* env, const Letter* path, const OrtSessionOptions* options, OrtSession** out))              \
  NAME(ReleaseSession, 95, void, (OrtSession* session))                                                          \
  NAME(Run, 9, OrtStatus*,                                                                                       \
       (OrtSession* session, const OrtRunOptions* options, const char* const* input_names,                       \
        const OrtValue* const* inputs, std::size_t input_count, const char* const* output_names,                 \
        std::size_t output_count, OrtValue** outputs))

const OrtApi* api = nullptr;

#define EXAMPLE_CALL(name, slot, result, arguments)    \
  template <typename... Arguments>                     \
  result name(Arguments... values) {                   \
    return api->at<result(*) arguments>(slot)(values...); \
  }
MOE_ORT_FUNCTIONS(EXAMPLE_CALL)
EXAMPLE_FUNCTIONS(EXAMPLE_CALL)

[[noreturn]] void fail(const std::string& words) {
  std::fprintf(stderr, "%s\n", words.c_str());
  std::exit(1);
}

// The words of a status, empty where all is well.
std::string words_of(OrtStatus* status) {
  if (status == nullptr) return {};
  const std::string words = GetErrorMessage(status);
  ReleaseStatus(status);
  return words;
}

void check(OrtStatus* status) {
  const std::string words = words_of(status);
  if (!words.empty()) fail(words);
}

using GetBase = const OrtApiBase* (*)();

// The one function that onnxruntime's library exports.
GetBase base_of(const Path& library) {
#if defined(_WIN32)
  const HMODULE loaded = LoadLibraryW(library.c_str());
  void* const found = loaded == nullptr ? nullptr : reinterpret_cast<void*>(GetProcAddress(loaded, "OrtGetApiBase"));
#else
  void* const loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) fail(dlerror());
  void* const found = dlsym(loaded, "OrtGetApiBase");
#endif
  if (found == nullptr) fail(library.string() + " cannot be loaded, or is no onnxruntime");
  return reinterpret_cast<GetBase>(found);
}

OrtValue* tensor(const OrtMemoryInfo* memory, void* data, std::size_t bytes, std::vector<std::int64_t> shape,
                 Type type) {
  OrtValue* value = nullptr;
  const std::int64_t* sizes = shape.data();
  check(CreateTensorWithDataAsOrtValue(memory, data, bytes, sizes, shape.size(), type, &value));
  return value;
}

// One run; prints the rows of the gradient, or what the operator refuses.
void run(OrtSession* session, const OrtMemoryInfo* memory, std::vector<float>& rows, std::int64_t hidden,
         std::vector<std::int32_t>& index) {
  const auto count = std::int64_t(index.size());
  OrtValue* inputs[] = {
      tensor(memory, rows.data(), rows.size() * sizeof(float), {count, hidden}, Type::float32),
      tensor(memory, index.data(), index.size() * sizeof(std::int32_t), {count}, Type::int32),
  };
  const char* const input_names[] = {"grad_expanded_x", "expanded_row_idx"};
  const char* const output_names[] = {"grad_x"};
  OrtValue* output = nullptr;
  const std::string refused =
      words_of(Run(session, static_cast<const OrtRunOptions*>(nullptr), input_names,
                   static_cast<const OrtValue* const*>(inputs), std::size_t(2), output_names, std::size_t(1), &output));
  for (OrtValue* input : inputs) ReleaseValue(input);
  if (!refused.empty()) {
    std::printf("refused: %s\n", refused.c_str());
    return;
  }
  OrtTensorTypeAndShapeInfo* info = nullptr;
  std::int64_t shape[2] = {0, 0};
  void* data = nullptr;
  check(GetTensorTypeAndShape(static_cast<const OrtValue*>(output), &info));
  check(GetDimensions(info, shape, std::size_t(2)));
  check(GetTensorMutableData(output, &data));
  for (std::int64_t t = 0; t < shape[0]; ++t) {
    std::printf("grad_x[%lld]:", static_cast<long long>(t));
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      std::printf(" %g", double(static_cast<const float*>(data)[t * shape[1] + h]));
    }
    std::printf("\n");
  }
  ReleaseTensorTypeAndShapeInfo(info);
  ReleaseValue(output);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) fail("usage: example ONNXRUNTIME_LIBRARY ASCEND_MOE_LIBRARY MODEL");
  const Path runtime = argv[1], kernels = argv[2], model = argv[3];
  api = base_of(runtime)()->GetApi(kApiVersion);
  if (api == nullptr) fail("that onnxruntime is too old");

  OrtEnv* env = nullptr;
  OrtSessionOptions* options = nullptr;
  OrtSession* session = nullptr;
  OrtMemoryInfo* memory = nullptr;
  constexpr int kFatal = 4;  // errors come as statuses; they need not be logged as well
  check(CreateEnv(kFatal, "example", &env));
  check(CreateSessionOptions(&options));
  check(RegisterCustomOpsLibrary_V2(options, kernels.c_str()));
  check(CreateSession(static_cast<const OrtEnv*>(env), model.c_str(), static_cast<const OrtSessionOptions*>(options),
                      &session));
  check(CreateCpuMemoryInfo(std::int32_t(0), std::int32_t(0), &memory));

  std::vector<float> rows = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  std::vector<std::int32_t> index = {4, 1, 5, 3, 0, 2};
  run(session, memory, rows, 2, index);
  index[3] = 99;
  run(session, memory, rows, 2, index);

  ReleaseMemoryInfo(memory);
  ReleaseSession(session);
  ReleaseSessionOptions(options);
  ReleaseEnv(env);
  return 0;
}
