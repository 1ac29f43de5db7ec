// MoeTokenPermuteWithRoutingMapGrad: each token is the sum of its rows, each cell of the map has the gradient of its
// row's weight, see card.md beside this file.

#include <cstring>

#include "../native/indices.h"
#include "../native/operator.h"
#include "../native/routing_map.h"
#include "../native/token_sums.h"

namespace moe {
namespace {

constexpr const char* kName = "MoeTokenPermuteWithRoutingMapGrad";
constexpr const char* kRows = "permuted_token_output_grad";
constexpr const char* kWeights = "permuted_probs_output_grad";
enum Input { kGrad, kProbs, kIndex, kMap };

// Whether a map of shape (0, 0), which is absent, may be the map of no tokens: there are no rows.
bool is_of_nothing(const TensorInfo& map, const TensorInfo& index) {
  return map.there && index.ranked && index.shape.size() == 1 && index.shape[0].is(0);
}

void missing(const Infos& inputs, const Attributes& attributes) {
  const bool no_map = presence(inputs[kMap]) == Presence::no && !is_of_nothing(inputs[kMap], inputs[kIndex]);
  if (attributes["drop_and_pad"] || presence(inputs[kProbs]) != Presence::yes || !no_map) return;
  MissingInputError(kName, ": 'routing_map' is missing although '", kWeights, "' is given. Pass it, or leave out '",
                    kWeights, "'.");
}

void mixes(const Infos& inputs) {
  if (presence(inputs[kProbs]) != Presence::no) check_probs_dtype(kName, kRows, inputs[kGrad], inputs[kProbs], kWeights);
}

// [0, ?] may be [0, 0] and so absent: its 0 is not yet the number of tokens.
TensorInfo known(TensorInfo map) {
  if (presence(map) == Presence::no) return {};
  if (presence(map) == Presence::maybe && map.ranked) {
    for (Dim& dim : map.shape) dim = dim.is(0) ? Dim() : dim;
  }
  return map;
}

Infos shapes(const Infos& inputs, const Attributes& attributes) {
  const TensorInfo &grad = inputs[kGrad], &probs = inputs[kProbs], &index = inputs[kIndex];
  const Presence there = presence(probs);
  const bool no_map = presence(inputs[kMap]) == Presence::no, weighted = there == Presence::yes;
  const TensorInfo map = known(inputs[kMap]);
  Axes axes(kName);
  axes.read({{kRows, grad, "N H"},
             {kWeights, weighted ? probs : TensorInfo(), "N"},
             {"sorted_indices", index, "N"},
             {"routing_map", map, "T E"}});
  const struct {
    char letter;
    const char* attribute;
    const char* what;
  } sizes[] = {{'T', "tokens_num", "tokens"}, {'E', "num_experts", "experts"}};
  for (const auto& size : sizes) {
    if (const std::int64_t value = attributes[size.attribute]) {
      axes.bind(size.letter, value, words("attribute '", size.attribute, "'"));
    } else if (no_map && is_of_nothing(inputs[kMap], index)) {
      axes.bind(size.letter, 0, "'routing_map', of shape [0, 0]");
    } else if (no_map && (size.letter == 'T' || weighted)) {
      MissingInputError(kName, ": 'routing_map' and attribute '", size.attribute,
                        "' are both missing, so the number of ", size.what, " is unknown. Give ", size.attribute, ".");
    }
  }
  if (attributes["drop_and_pad"]) {
    axes.bind('C', axes.divide('N', axes['E'], "the number of experts"), "N / E");
  } else {
    axes.bind('K', axes.divide('N', axes['T'], "the number of tokens"), "N / T");
  }
  const TensorInfo tokens(grad.type, {axes['T'], axes['H']});
  if (!probs.there) return {tokens, TensorInfo()};
  const Dims cells = weighted ? Dims{axes['T'], axes['E']} : there == Presence::no ? Dims{0, 0} : Dims{Dim(), Dim()};
  return {tokens, TensorInfo(probs.type, cells)};
}

template <typename T>
void add_rows(Call& call, bool padded) {
  const std::vector<std::int64_t> shape = call.output_shape(0);
  const std::int64_t tokens = shape[0], hidden = shape[1], num_rows = call.size(kIndex, 0);
  T* const out = call.output<T>(0, shape);
  if (out == nullptr) return;
  const T* const grad = call.input<T>(kGrad);
  const std::int32_t* const index = call.input<std::int32_t>(kIndex);
  TokenSums<T> sums;
  sums.rows.reserve(std::size_t(num_rows));
  if (padded) {
    Groups of_token(index, num_rows, tokens);
    for (const std::int32_t row : of_token.order) sums.add(grad + row * hidden);
    sums.start = std::move(of_token.start);
  } else {
    const std::int64_t top_k = num_rows / tokens;
    sums.start.reserve(std::size_t(tokens) + 1);
    for (std::int64_t token = 0; token < tokens; ++token) {
      sums.start.push_back(std::int64_t(sums.rows.size()));
      for (std::int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
        if (index[slot] >= 0) sums.add(grad + index[slot] * hidden);
      }
    }
    sums.start.push_back(std::int64_t(sums.rows.size()));
  }
  sums.write(call, out, tokens, hidden);
}

// What is not in a cell of `cells`, one for each row or -1, is 0. Padded, a cell is the row's token and the expert
// whose C rows it is among; of two rows for one cell the last counts.
template <typename P>
void place_probs(Call& call, bool padded, const std::vector<std::int64_t>& cells) {
  const std::vector<std::int64_t> shape = call.output_shape(1);
  const std::int64_t experts = shape[1], num_rows = call.size(kIndex, 0);
  P* const out = call.output<P>(1, shape);
  if (out == nullptr) return;
  const P* const probs = call.input<P>(kProbs);
  const std::int64_t bytes = experts * std::int64_t(sizeof(P));
  call.parallel(shape[0], bytes, [=](std::int64_t begin, std::int64_t end) {
    std::memset(static_cast<void*>(out + begin * experts), 0, std::size_t((end - begin) * bytes));
  });
  if (!padded) {
    for (std::size_t row = 0; row < cells.size() && cells[row] >= 0; ++row) out[cells[row]] = probs[row];
    return;
  }
  const std::int32_t* const index = call.input<std::int32_t>(kIndex);
  const std::int64_t capacity = num_rows / experts;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    for (std::int64_t row = expert * capacity; row < (expert + 1) * capacity; ++row) {
      out[index[row] * experts + expert] = probs[row];
    }
  }
}

void compute(Call& call) {
  const bool padded = call.attributes["drop_and_pad"] != 0, weighted = call.is_given(kProbs);
  const std::int64_t tokens = call.output_shape(0)[0], rows = call.size(kIndex, 0);
  const Index index{kName, "sorted_indices", call.input<std::int32_t>(kIndex), rows};
  std::vector<std::int64_t> cells;
  if (padded) {
    check_range(index, 0, tokens, "drop_and_pad, a token");
  } else {
    check_range(index, -1, rows, "-1 leaves the slot out");
    check_unique(index, rows, "each slot has a row of its own");
    // A map of shape (0, 0) selects nothing, whatever the attributes say of the sizes.
    if (weighted && call.is_given(kMap)) {
      cells = row_cells(kName, call.input<std::int8_t>(kMap), tokens, call.output_shape(1)[1], rows);
    }
  }
  for_float(call.info(kGrad).type, [&](auto zero) { add_rows<decltype(zero)>(call, padded); });
  if (!weighted) {
    call.output<char>(1, call.output_shape(1));
    return;
  }
  for_float(call.info(kProbs).type, [&](auto zero) { place_probs<decltype(zero)>(call, padded, cells); });
}

Attr size_attribute(const char* name) { return {name, "int", "in [0, 2^31)", 0, kMaxRows}; }

}  // namespace

extern const Spec moe_token_permute_with_routing_map_grad = {
    kName,
    {
        {kRows, "N H"},
        {kWeights, "N", Kind::floats, true},
        {"sorted_indices", "N", Kind::indices},
        {"routing_map", "T E", Kind::maps, true},
    },
    {{"tokens_grad", "T H"}, {"probs_grad", "T E", Kind::floats, true, kProbs}},
    {size_attribute("num_experts"), size_attribute("tokens_num"), switch_attribute("drop_and_pad")},
    shapes,
    compute,
    missing,
    mixes,
};

}  // namespace moe
