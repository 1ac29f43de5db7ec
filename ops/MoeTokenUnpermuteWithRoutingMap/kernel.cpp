// MoeTokenUnpermuteWithRoutingMap: the combine, each token the weighted sum of its experts' rows, see card.md
// beside this file.

#include <algorithm>

#include "../native/indices.h"
#include "../native/operator.h"
#include "../native/routing_map.h"
#include "../native/token_sums.h"

namespace moe {
namespace {

constexpr const char* kName = "MoeTokenUnpermuteWithRoutingMap";
enum Input { kRows, kIndex, kMap, kProbs };
enum Output { kSums, kOutIndex, kTokenId, kUsed };

void missing(const Infos& inputs, const Attributes& attributes) {
  if (presence(inputs[kProbs]) != Presence::yes || attributes["drop_and_pad"] != 0) return;
  require_companion(kName, "routing_map", presence(inputs[kMap]) != Presence::no);
}

void mixes(const Infos& inputs) {
  if (presence(inputs[kProbs]) == Presence::no) return;
  check_probs_dtype(kName, "permuted_tokens", inputs[kRows], inputs[kProbs]);
}

Infos shapes(const Infos& inputs, const Attributes& attributes) {
  const TensorInfo map = where_present(inputs[kMap]), probs = where_present(inputs[kProbs]);
  const bool padded = attributes["drop_and_pad"] != 0;
  const std::vector<std::int64_t>& restore = attributes.list("restore_shape");
  check_sizes(kName, "restore_shape", restore);
  Axes axes(kName);
  axes.read({{"permuted_tokens", inputs[kRows], padded ? "N H" : "P H"},
             {"sorted_indices", inputs[kIndex], "N"},
             {"routing_map", map, "T E"},
             {"probs", probs, "T E"}});
  if (!probs.there && !map.there) {
    if (restore.empty()) {
      MissingInputError(kName,
                        ": 'routing_map', 'probs' and attribute 'restore_shape' are all missing, so the number of "
                        "tokens is unknown. Give restore_shape = [T, H].");
    }
    axes.bind('T', restore[0], "attribute 'restore_shape'");
    const Dim& hidden = axes['H'];
    if (!hidden.known() && hidden.name.empty() && restore.size() == 2) {
      axes.bind('H', restore[1], "attribute 'restore_shape'");
    }
  }
  const TensorInfo sums(inputs[kRows].type, {axes['T'], axes['H']});
  check_restore_shape(kName, restore, "unpermuted_tokens", sums);
  if (!padded) {
    axes.bind('K', axes.divide('N', axes['T'], "the number of tokens"), "N / T");
  } else if (probs.there) {
    axes.bind('C', axes.divide('N', axes['E'], "the number of experts"), "N / E");
  }
  if (probs.there) check_limits(kName, axes, padded);
  const TensorInfo index(Type::int32, {axes['N']});
  const Type used = inputs[kProbs].there ? inputs[kProbs].type : inputs[kRows].type;
  return {sums, index, index, TensorInfo(used, {probs.there ? axes['N'] : Dim(0)})};
}

// Unpadded, there is a row for every slot, or one for every pair that the map selects.
void check_rows(const Call& call) {
  const std::int64_t slots = call.size(kIndex, 0), rows = call.size(kRows, 0);
  const std::int64_t selected = call.is_given(kMap) ? call.info(kMap).selected : slots;
  if (rows == slots || rows == selected) return;
  ShapeError(kName, ": 'permuted_tokens' must have N = ", slots, " rows, or as many as 'routing_map' selects (",
             selected, "), got shape ", show(call.info(kRows).shape), ".");
}

// Each row goes to the token that the index names.
template <typename T, typename P>
void run_padded(Call& call, std::int64_t tokens) {
  const std::int64_t count = call.size(kIndex, 0), hidden = call.size(kRows, 1);
  const std::int64_t experts = call.is_given(kProbs) ? call.size(kProbs, 1) : 0;
  const std::int64_t capacity = std::max<std::int64_t>(count / std::max<std::int64_t>(experts, 1), 1);
  const auto* const index = call.input<std::int32_t>(kIndex);
  const P* const probs = call.is_given(kProbs) ? call.input<P>(kProbs) : nullptr;
  const T* const rows = call.input<T>(kRows);
  const Groups of_token(index, count, tokens);

  T* const out = call.output<T>(kSums, {tokens, hidden});
  auto* const out_index = call.output<std::int32_t>(kOutIndex, {count});
  auto* const token_id = call.output<std::int32_t>(kTokenId, {count});
  P* const used = call.output<P>(kUsed, {probs == nullptr ? 0 : count});
  TokenSums<T> terms;
  terms.rows.reserve(std::size_t(count));
  for (std::int64_t place = 0; place < count; ++place) {
    const std::int32_t row = of_token.order[std::size_t(place)], token = index[row];
    if (out_index != nullptr) out_index[place] = row;
    if (token_id != nullptr) token_id[place] = token;
    if (probs == nullptr) {
      terms.add(rows + row * hidden);
      continue;
    }
    const P weight = probs[token * experts + row / capacity];
    if (used != nullptr) used[row] = weight;
    terms.add(rows + row * hidden, widen(weight));
  }
  terms.start = of_token.start;
  terms.write(call, out, tokens, hidden);
}

// Each token names the rows of its slots. What is left out is left out, not multiplied by 0: a NaN in the row of an
// expert without weight stays there.
template <typename T, typename P>
void run_unpadded(Call& call, std::int64_t tokens) {
  const std::int64_t count = call.size(kIndex, 0), hidden = call.size(kRows, 1);
  const std::int64_t top_k = count / std::max<std::int64_t>(tokens, 1);
  const auto* const index = call.input<std::int32_t>(kIndex);
  const P* const probs = call.is_given(kProbs) ? call.input<P>(kProbs) : nullptr;
  const T* const rows = call.input<T>(kRows);
  std::vector<std::int64_t> cells;
  if (probs != nullptr) {
    cells = slot_cells(kName, call.input<std::int8_t>(kMap), tokens, call.size(kProbs, 1), top_k);
  }

  T* const out = call.output<T>(kSums, {tokens, hidden});
  auto* const out_index = call.output<std::int32_t>(kOutIndex, {count});
  auto* const token_id = call.output<std::int32_t>(kTokenId, {count});
  P* const used = call.output<P>(kUsed, {probs == nullptr ? 0 : count});
  if (out_index != nullptr) std::copy(index, index + count, out_index);
  if (token_id != nullptr) std::copy(index, index + count, token_id);
  TokenSums<T> terms;
  terms.rows.reserve(std::size_t(count));
  terms.start.reserve(std::size_t(tokens) + 1);
  for (std::int64_t slot = 0, token = 0; token < tokens; ++token) {
    terms.start.push_back(std::int64_t(terms.rows.size()));
    for (std::int64_t k = 0; k < top_k; ++k, ++slot) {
      const std::int32_t row = index[slot];
      if (probs == nullptr) {
        if (row >= 0) terms.add(rows + row * hidden);
        continue;
      }
      const std::int64_t cell = cells[std::size_t(slot)];
      const P weight = cell < 0 ? P() : probs[cell];
      if (used != nullptr) used[slot] = weight;
      if (row >= 0 && widen(weight) != 0) terms.add(rows + row * hidden, widen(weight));
    }
  }
  terms.start.push_back(std::int64_t(terms.rows.size()));
  terms.write(call, out, tokens, hidden);
}

void compute(Call& call) {
  const bool padded = call.attributes["drop_and_pad"] != 0;
  const std::int64_t tokens = call.output_shape(kSums)[0];
  const Index index{kName, "sorted_indices", call.input<std::int32_t>(kIndex), call.size(kIndex, 0)};
  if (padded) {
    check_range(index, 0, tokens, "drop_and_pad, a token");
  } else {
    check_rows(call);
    check_range(index, -1, call.size(kRows, 0), "-1 leaves the slot out");
    check_unique(index, call.size(kRows, 0), "each slot has a row of its own");
  }
  const Type rows = call.info(kRows).type;
  const Type probs = call.is_given(kProbs) ? call.info(kProbs).type : rows;
  for_floats(rows, probs, [&](auto zero, auto prob) {
    if (padded) {
      run_padded<decltype(zero), decltype(prob)>(call, tokens);
    } else {
      run_unpadded<decltype(zero), decltype(prob)>(call, tokens);
    }
  });
}

}  // namespace

extern const Spec moe_token_unpermute_with_routing_map = {
    kName,
    {
        {"permuted_tokens", "N H"},
        {"sorted_indices", "N", Kind::indices},
        {"routing_map", "T E", Kind::maps, true},
        {"probs", "T E", Kind::floats, true},
    },
    {
        {"unpermuted_tokens", "T H"},
        {"out_index", "N", Kind::indices},
        {"permute_token_id", "N", Kind::indices},
        {"permute_probs", "N", Kind::floats, true, kProbs},
    },
    {switch_attribute("drop_and_pad"), restore_shape_attribute()},
    shapes,
    compute,
    missing,
    mixes,
};

}  // namespace moe
