// The entry point: everything of the domain `ascend.moe`, in one registration.

#include <cstdio>

#include "operator.h"

#ifndef ASCEND_MOE_VERSION
#define ASCEND_MOE_VERSION "unknown"
#endif
#ifndef ASCEND_MOE_SOURCES
#define ASCEND_MOE_SOURCES "unknown"
#endif

#if defined(_WIN32)
#define MOE_EXPORT extern "C" __declspec(dllexport)
#else
#define MOE_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace moe {
// One line an operator; its Spec is in ops/<Op>/kernel.cpp.
#define MOE_OPERATORS(NAME)                       \
  NAME(moe_adam_w)                                \
  NAME(moe_finalize_routing_v2)                   \
  NAME(moe_finalize_routing_v2_grad)              \
  NAME(moe_grouped_matmul)                        \
  NAME(moe_grouped_matmul_weight_grad)            \
  NAME(moe_init_routing_v2)                       \
  NAME(moe_init_routing_v2_grad)                  \
  NAME(moe_square_sum)                            \
  NAME(moe_swi_glu)                               \
  NAME(moe_swi_glu_grad)                          \
  NAME(moe_token_permute_with_routing_map)        \
  NAME(moe_token_permute_with_routing_map_grad)   \
  NAME(moe_token_unpermute_with_routing_map)      \
  NAME(moe_token_unpermute_with_routing_map_grad)
#define MOE_DECLARE(name) extern const Spec name;
MOE_OPERATORS(MOE_DECLARE)
#undef MOE_DECLARE

namespace {

// From 1.28 on nodes may leave out optional outputs of custom ops and inputs may be of any type; before, the
// runtime refuses such operators or ends the process.
bool is_supported(const char* version) {
  int major = 0, minor = 0;
  return std::sscanf(version, "%d.%d", &major, &minor) == 2 && (major > 1 || minor >= 28);
}

}  // namespace
}  // namespace moe

MOE_EXPORT moe::OrtStatus* RegisterCustomOps(moe::OrtSessionOptions* options, const moe::OrtApiBase* base) {
  using namespace moe;
  ort_api = base->GetApi(kApiVersion);
  if (ort_api == nullptr || !is_supported(base->GetVersionString())) {
    // Every runtime has the first table, whose CreateStatus says what is wrong.
    ort_api = base->GetApi(1);
    const std::string words = std::string("ascend_moe needs onnxruntime 1.28 or later, this is ") +
                              base->GetVersionString() + ". Models run there by their function bodies.";
    return ort_api == nullptr ? nullptr : ort::CreateStatus(ErrorCode::fail, words.c_str());
  }
#define MOE_MAKE(name) custom_op(name),
  static OrtCustomOp* const ops[] = {MOE_OPERATORS(MOE_MAKE)};
#undef MOE_MAKE
  OrtCustomOpDomain* domain = nullptr;
  if (OrtStatus* status = ort::CreateCustomOpDomain("ascend.moe", &domain)) return status;
  for (const OrtCustomOp* op : ops) {
    if (OrtStatus* status = ort::CustomOpDomain_Add(domain, op)) {
      ort::ReleaseCustomOpDomain(domain);
      return status;
    }
  }
  // The options keep a pointer to the domain, as do their sessions: it is never released.
  return ort::AddCustomOpDomain(options, domain);
}

MOE_EXPORT const char* ascend_moe_version(void) { return ASCEND_MOE_VERSION; }

MOE_EXPORT const char* ascend_moe_build(void) {
  static const std::string text = std::string(
#if defined(__clang__)
                                      "clang " __clang_version__
#elif defined(__GNUC__)
                                      "gcc " __VERSION__
#else
                                      "unknown compiler"
#endif
                                      ", vectors: ") +
                                  moe::row_table().name + ", sources " ASCEND_MOE_SOURCES;
  return text.c_str();
}
