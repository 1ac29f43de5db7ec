// The entry point: everything of the domain `ascend.moe`, in one registration.

#include "operator.h"

#ifndef ASCEND_MOE_VERSION
#define ASCEND_MOE_VERSION "unknown"
#endif
#ifndef ASCEND_MOE_DIGEST
#define ASCEND_MOE_DIGEST "unknown"
#endif

#if defined(_WIN32)
#define MOE_EXPORT extern "C" __declspec(dllexport)
#else
#define MOE_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace moe {
#define MOE_OPERATORS(NAME)                                                                                   \
  NAME(moe_init_routing_v2_grad) NAME(moe_token_unpermute_with_routing_map_grad)
#define MOE_DECLARE(name) extern const Spec name;
MOE_OPERATORS(MOE_DECLARE)
#undef MOE_DECLARE
}  // namespace moe

MOE_EXPORT moe::OrtStatus* RegisterCustomOps(moe::OrtSessionOptions* options, const moe::OrtApiBase* base) {
  using namespace moe;
  const OrtApi* api = base->GetApi(kApiVersion);
  if (api == nullptr) {
    // Every runtime has the first table, whose CreateStatus says what is wrong.
    const OrtApi* oldest = base->GetApi(1);
    if (oldest == nullptr) return nullptr;
    const std::string words = std::string("ascend_moe needs onnxruntime 1.17 or later, this is ") + base->GetVersionString();
    ort_api = oldest;
    OrtStatus* status = ort::CreateStatus(ErrorCode::fail, words.c_str());
    ort_api = nullptr;
    return status;
  }
  ort_api = api;
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
                                  moe::row_table().name + ", sources " ASCEND_MOE_DIGEST;
  return text.c_str();
}
