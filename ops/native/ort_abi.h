// The slice of the ONNX Runtime C ABI that this library uses, declared by slot.
//
// The table behind OrtApi is append-only: a function keeps its slot for ever, and is there in every runtime of
// at least the API version it came with. Each slot is one pointer. Only what is used stands here; to use one
// more, add its slot and signature below, and raise kApiVersion if it came later.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe {

// The lowest API version that has every slot used here: KernelContext_ParallelFor and shape inference are of 1.17.
constexpr std::uint32_t kApiVersion = 17;

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtShapeInferContext;
struct OrtOpAttr;
struct OrtOp;
struct OrtMemoryInfo;

// Element types as the C ABI numbers them.
enum class Type : std::int32_t {
  undefined = 0,
  float32 = 1,
  uint8 = 2,
  int8 = 3,
  uint16 = 4,
  int16 = 5,
  int32 = 6,
  int64 = 7,
  string = 8,
  boolean = 9,
  float16 = 10,
  float64 = 11,
  uint32 = 12,
  uint64 = 13,
  complex64 = 14,
  complex128 = 15,
  bfloat16 = 16,
};

enum class AttrType : std::int32_t { undefined = 0, integer = 1, integers = 2, real = 3, reals = 4, text = 5 };

enum class ErrorCode : std::int32_t { fail = 1, invalid_argument = 2 };

enum class Characteristic : std::int32_t { required = 0, optional = 1, variadic = 2 };

// A function table seen as an array of pointers.
class OrtApi {
 public:
  template <typename Function>
  Function at(std::size_t slot) const {
    return reinterpret_cast<Function>(const_cast<void*>(slots_[slot]));
  }

 private:
  const void* slots_[1];
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(std::uint32_t version);
  const char* (*GetVersionString)();
};

// NAME(slot, result, arguments): a call through the table.
#define MOE_ORT_FUNCTIONS(NAME)                                                                                  \
  NAME(CreateStatus, 0, OrtStatus*, (ErrorCode code, const char* message))                                       \
  NAME(GetErrorMessage, 2, const char*, (const OrtStatus* status))                                               \
  NAME(ReleaseStatus, 93, void, (OrtStatus* status))                                                             \
  NAME(CreateCustomOpDomain, 26, OrtStatus*, (const char* domain, OrtCustomOpDomain** out))                      \
  NAME(CustomOpDomain_Add, 27, OrtStatus*, (OrtCustomOpDomain* domain, const OrtCustomOp* op))                   \
  NAME(AddCustomOpDomain, 28, OrtStatus*, (OrtSessionOptions* options, OrtCustomOpDomain* domain))               \
  NAME(ReleaseCustomOpDomain, 101, void, (OrtCustomOpDomain* domain))                                            \
  NAME(KernelInfoGetAttribute_int64, 86, OrtStatus*, (const OrtKernelInfo* info, const char* name, std::int64_t* out)) \
  NAME(KernelInfoGetAttributeArray_int64, 163, OrtStatus*,                                                       \
       (const OrtKernelInfo* info, const char* name, std::int64_t* out, std::size_t* size))                      \
  NAME(KernelContext_GetInputCount, 88, OrtStatus*, (const OrtKernelContext* context, std::size_t* out))         \
  NAME(KernelContext_GetOutputCount, 89, OrtStatus*, (const OrtKernelContext* context, std::size_t* out))        \
  NAME(KernelContext_GetInput, 90, OrtStatus*,                                                                   \
       (const OrtKernelContext* context, std::size_t index, const OrtValue** out))                               \
  NAME(KernelContext_GetOutput, 91, OrtStatus*,                                                                  \
       (OrtKernelContext* context, std::size_t index, const std::int64_t* dims, std::size_t rank, OrtValue** out)) \
  NAME(KernelContext_ParallelFor, 274, OrtStatus*,                                                               \
       (const OrtKernelContext* context, void (*task)(void*, std::size_t), std::size_t total,                    \
        std::size_t num_batch, void* user))                                                                      \
  NAME(GetTensorTypeAndShape, 65, OrtStatus*, (const OrtValue* value, OrtTensorTypeAndShapeInfo** out))          \
  NAME(ReleaseTensorTypeAndShapeInfo, 99, void, (OrtTensorTypeAndShapeInfo* info))                               \
  NAME(GetTensorElementType, 60, OrtStatus*, (const OrtTensorTypeAndShapeInfo* info, Type* out))                 \
  NAME(GetDimensionsCount, 61, OrtStatus*, (const OrtTensorTypeAndShapeInfo* info, std::size_t* out))            \
  NAME(GetDimensions, 62, OrtStatus*,                                                                            \
       (const OrtTensorTypeAndShapeInfo* info, std::int64_t* dims, std::size_t rank))                            \
  NAME(GetSymbolicDimensions, 63, OrtStatus*,                                                                    \
       (const OrtTensorTypeAndShapeInfo* info, const char** names, std::size_t rank))                            \
  NAME(GetTensorMutableData, 51, OrtStatus*, (OrtValue* value, void** out))                                     \
  NAME(CreateTensorTypeAndShapeInfo, 57, OrtStatus*, (OrtTensorTypeAndShapeInfo** out))                         \
  NAME(SetTensorElementType, 58, OrtStatus*, (OrtTensorTypeAndShapeInfo* info, Type type))                      \
  NAME(SetDimensions, 59, OrtStatus*,                                                                            \
       (OrtTensorTypeAndShapeInfo* info, const std::int64_t* dims, std::size_t rank))                           \
  NAME(SetSymbolicDimensions, 271, OrtStatus*,                                                                   \
       (OrtTensorTypeAndShapeInfo* info, const char** names, std::size_t rank))                                 \
  NAME(ShapeInferContext_GetInputCount, 267, OrtStatus*, (const OrtShapeInferContext* context, std::size_t* out)) \
  NAME(ShapeInferContext_GetInputTypeShape, 268, OrtStatus*,                                                     \
       (const OrtShapeInferContext* context, std::size_t index, OrtTensorTypeAndShapeInfo** out))                \
  NAME(ShapeInferContext_GetAttribute, 269, OrtStatus*,                                                          \
       (const OrtShapeInferContext* context, const char* name, const OrtOpAttr** out))                           \
  NAME(ShapeInferContext_SetOutputTypeShape, 270, OrtStatus*,                                                    \
       (const OrtShapeInferContext* context, std::size_t index, const OrtTensorTypeAndShapeInfo* info))          \
  NAME(ReadOpAttr, 272, OrtStatus*,                                                                              \
       (const OrtOpAttr* attribute, AttrType type, void* data, std::size_t size, std::size_t* out))              \
  NAME(CreateOpAttr, 211, OrtStatus*,                                                                            \
       (const char* name, const void* data, int size, AttrType type, OrtOpAttr** out))                           \
  NAME(ReleaseOpAttr, 212, void, (OrtOpAttr* attribute))                                                        \
  NAME(CreateOp, 213, OrtStatus*,                                                                                \
       (const OrtKernelInfo* info, const char* op_name, const char* domain, int version,                         \
        const char** type_names, const Type* types, int type_count, const OrtOpAttr* const* attributes,          \
        int attribute_count, int input_count, int output_count, OrtOp** out))                                    \
  NAME(InvokeOp, 214, OrtStatus*,                                                                                \
       (const OrtKernelContext* context, const OrtOp* op, const OrtValue* const* inputs, int input_count,        \
        OrtValue* const* outputs, int output_count))                                                             \
  NAME(ReleaseOp, 215, void, (OrtOp* op))                                                                       \
  NAME(CreateCpuMemoryInfo, 69, OrtStatus*,                                                                      \
       (std::int32_t allocator_type, std::int32_t memory_type, OrtMemoryInfo** out))                             \
  NAME(ReleaseMemoryInfo, 94, void, (OrtMemoryInfo* info))                                                      \
  NAME(CreateTensorWithDataAsOrtValue, 49, OrtStatus*,                                                           \
       (const OrtMemoryInfo* info, void* data, std::size_t bytes, const std::int64_t* dims, std::size_t rank,    \
        Type type, OrtValue** out))                                                                              \
  NAME(ReleaseValue, 96, void, (OrtValue* value))

// What the runtime asks of an operator, all fields of API version 17 and later in order. Zero what is not used.
struct OrtCustomOp {
  std::uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  Type (*GetInputType)(const OrtCustomOp*, std::size_t);
  std::size_t (*GetInputTypeCount)(const OrtCustomOp*);
  Type (*GetOutputType)(const OrtCustomOp*, std::size_t);
  std::size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  Characteristic (*GetInputCharacteristic)(const OrtCustomOp*, std::size_t);
  Characteristic (*GetOutputCharacteristic)(const OrtCustomOp*, std::size_t);
  std::int32_t (*GetInputMemoryType)(const OrtCustomOp*, std::size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  // From API version 18 on; a runtime asked for version 17 does not read them.
  std::size_t (*GetMayInplace)(int**, int**);
  void (*ReleaseMayInplace)(int*, int*);
  std::size_t (*GetAliasMap)(int**, int**);
  void (*ReleaseAliasMap)(int*, int*);
};

static_assert(sizeof(OrtCustomOp) == 208 || sizeof(void*) != 8, "OrtCustomOp has 26 fields of 8 bytes");
static_assert(offsetof(OrtCustomOp, KernelComputeV2) == 144 || sizeof(void*) != 8, "see the C header");

}  // namespace moe
