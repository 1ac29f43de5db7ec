// What the library exports.

#include <cstddef>

#if defined(_WIN32)
#define ASCEND_MOE_EXPORT extern "C" __declspec(dllexport)
#else
#define ASCEND_MOE_EXPORT extern "C" __attribute__((visibility("default")))
#endif

struct OrtStatus;
struct OrtSessionOptions;
struct OrtApiBase;

#if defined(__clang__)
#define ASCEND_MOE_COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define ASCEND_MOE_COMPILER "gcc " __VERSION__
#else
#define ASCEND_MOE_COMPILER "another compiler"
#endif

ASCEND_MOE_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions*, const OrtApiBase*) { return nullptr; }

// ASCEND_MOE_VERSION and ASCEND_MOE_SOURCES are defined for this file only, by CMakeLists.txt.
ASCEND_MOE_EXPORT const char* ascend_moe_version() { return ASCEND_MOE_VERSION; }

ASCEND_MOE_EXPORT const char* ascend_moe_build() {
  return ASCEND_MOE_COMPILER "; sources " ASCEND_MOE_SOURCES;
}
