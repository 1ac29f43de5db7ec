// ort_abi.h against onnxruntime's own header, which this project does not need, where that is to be had: Debian's
// libonnxruntime-dev, or `headers` in the archive onnxruntime-android.
//
//   c++ -std=c++17 -fsyntax-only -I ops/native -I FOLDER_OF_onnxruntime_c_api.h tests/native/abi.cpp
//
// It compiles if all slots, all fields of OrtCustomOp, and the sizes of all arguments are as there.

#include <onnxruntime_c_api.h>

#include <cstddef>

namespace theirs {
using Api = ::OrtApi;
using CustomOp = ::OrtCustomOp;
}  // namespace theirs

#include "ort_abi.h"

namespace {

template <typename T>
constexpr std::size_t size_of = sizeof(T);
template <>
constexpr std::size_t size_of<void> = 0;

template <typename Function>
struct Sizes;
template <typename Result, typename... Arguments>
struct Sizes<Result (*)(Arguments...)> {
  static constexpr std::size_t count = 1 + sizeof...(Arguments);
  static constexpr std::size_t values[] = {size_of<Result>, sizeof(Arguments)...};
};
template <typename Result, typename... Arguments>
struct Sizes<Result (*)(Arguments...) noexcept> : Sizes<Result (*)(Arguments...)> {};

template <typename Left, typename Right>
constexpr bool are_called_alike() {
  if (Sizes<Left>::count != Sizes<Right>::count) return false;
  for (std::size_t i = 0; i < Sizes<Left>::count; ++i) {
    if (Sizes<Left>::values[i] != Sizes<Right>::values[i]) return false;
  }
  return true;
}

}  // namespace

namespace moe {

#define CHECK_FUNCTION(name, slot, result, arguments)                                        \
  static_assert(offsetof(theirs::Api, name) == slot * sizeof(void*), #name " has that slot"); \
  static_assert(are_called_alike<decltype(theirs::Api::name), result(*) arguments>(), #name);
MOE_ORT_FUNCTIONS(CHECK_FUNCTION)

#define CHECK_FIELD(name)                                                                  \
  static_assert(offsetof(theirs::CustomOp, name) == offsetof(OrtCustomOp, name), #name); \
  static_assert(sizeof(theirs::CustomOp::name) == sizeof(OrtCustomOp::name), #name);
CHECK_FIELD(version)
CHECK_FIELD(CreateKernel)
CHECK_FIELD(GetName)
CHECK_FIELD(GetExecutionProviderType)
CHECK_FIELD(GetInputType)
CHECK_FIELD(GetInputTypeCount)
CHECK_FIELD(GetOutputType)
CHECK_FIELD(GetOutputTypeCount)
CHECK_FIELD(KernelCompute)
CHECK_FIELD(KernelDestroy)
CHECK_FIELD(GetInputCharacteristic)
CHECK_FIELD(GetOutputCharacteristic)
CHECK_FIELD(GetInputMemoryType)
CHECK_FIELD(GetVariadicInputMinArity)
CHECK_FIELD(GetVariadicInputHomogeneity)
CHECK_FIELD(GetVariadicOutputMinArity)
CHECK_FIELD(GetVariadicOutputHomogeneity)
CHECK_FIELD(CreateKernelV2)
CHECK_FIELD(KernelComputeV2)
CHECK_FIELD(InferOutputShapeFn)
CHECK_FIELD(GetStartVersion)
CHECK_FIELD(GetEndVersion)
CHECK_FIELD(GetMayInplace)
CHECK_FIELD(ReleaseMayInplace)
CHECK_FIELD(GetAliasMap)
CHECK_FIELD(ReleaseAliasMap)
static_assert(sizeof(theirs::CustomOp) >= sizeof(OrtCustomOp), "fields are only added");

}  // namespace moe
