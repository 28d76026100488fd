// TND decode attention over a paged latent cache, and the write into that cache. Arguments, meaning, errors: tnd.py.
//
// A KV entry is read from memory once for all query rows of its slot (a row: one head of one token; up to PANEL rows).
// Entries come in tiles that fit a core's cache; within a tile, groups of up to four rows share every load. Softmax
// is online within a chunk of tiles; chunks, the unit of threads, are folded in order.
//
// Every number of a row comes from a fixed sequence of operations: lanes, tiles and chunks are counted from entry 0,
// and neither groups nor panels nor threads change what is added to what. So a row depends, bit for bit, on its query
// and the entries it sees and on nothing else: not on the batch, the length of its segment, other heads, or threads.
// (Compiled without contraction: a fused multiply-add stands where it is written.)
//
// GNU C++: vectors and their shuffles are compiled for whatever the processor has.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __FMA__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE;
constexpr int LANES = 8;
constexpr int TILE = 24;                    // Entries; a multiple of LANES and of every group of entries (update).
constexpr int64_t CHUNK = 10 * TILE;        // Entries.
constexpr int64_t PANEL = 256;              // Rows.
constexpr int64_t STATE = LATENT + 16;      // Floats of a row: sums, maximum, sum of weights, and up to a cache line.
constexpr int64_t HIGH = LATENT, TOTAL = LATENT + 1;
constexpr int64_t SMALL = 1024;             // Rows times entries below which a second thread costs more than it saves.
constexpr int64_t MOST_PARTIALS = 1 << 24;  // Floats.
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

using Vec = float __attribute__((vector_size(LANES * sizeof(float))));
using Ints = int32_t __attribute__((vector_size(LANES * sizeof(int32_t))));

inline Vec load(const float* from) {
  Vec x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }

inline Vec all(float x) { return Vec{x, x, x, x, x, x, x, x}; }

inline Vec madd(Vec a, Vec b, Vec c) {
#ifdef __FMA__
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline float sum(Vec x) {
  x += __builtin_shuffle(x, Ints{4, 5, 6, 7, 0, 1, 2, 3});
  x += __builtin_shuffle(x, Ints{2, 3, 0, 1, 6, 7, 4, 5});
  return x[0] + x[1];
}

// e to the x for x <= 0, to two units in the last place; 0 below -87. NaN stays NaN.
inline Vec exponential(Vec x) {
  const Vec low = all(-87.0f), shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer.
  const Vec within = x < low ? low : x;
  const Vec shifted = madd(within, all(1.44269504f), shift);
  const Vec n = shifted - shift;
  const Vec r = madd(n, all(2.12194440e-4f), madd(n, all(-0.693359375f), within));
  Vec y = all(1.9875691500e-4f);
  for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    y = madd(y, r, all(coefficient));
  }
  y = madd(y, r * r, r) + 1.0f;
  const Ints power = ((Ints)shifted - (Ints)shift + 127) << 23;
  return x < low ? all(0.0f) : y * (Vec)power;
}

inline float exponential(float x) { return exponential(all(x))[0]; }

// Where rows or entries are; the two parts need not be neighbours.
template <int64_t SIZE>
struct Pointers {
  const float* latent[SIZE];
  const float* rope[SIZE];
};
struct Tile : Pointers<TILE> {
  const float* value[TILE];
};

// scores[r][j] = scale q_r . k_j for R rows and the first `count` entries, rounded up to a multiple of C. AHEAD: loads
// the tile `next` meanwhile.
template <int R, int C, bool AHEAD>
void score(const float* const* latent, const float* const* rope, const Tile& tile, const Tile& next, int count,
           float scale, float* scores) {
  constexpr int LINE = 2 * LANES;
  for (int j = 0; j < count; j += C) {
    Vec sums[R][C] = {};
    const auto add = [&](const float* const* q, const float* const* k, const float* const* ahead, int64_t size) {
      for (int64_t line = 0; line < size; line += LINE) {
        if constexpr (AHEAD) {
          for (int c = 0; c < C; ++c) __builtin_prefetch(ahead[j + c] + line, 0, 2);
        }
        for (int64_t i = line; i < line + LINE; i += LANES) {
          Vec entries[C];
          for (int c = 0; c < C; ++c) entries[c] = load(k[j + c] + i);
          for (int r = 0; r < R; ++r) {
            const Vec x = load(q[r] + i);
            for (int c = 0; c < C; ++c) sums[r][c] = madd(x, entries[c], sums[r][c]);
          }
        }
      }
    };
    add(latent, tile.latent, next.latent, LATENT);
    add(rope, tile.rope, next.rope, ROPE);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) scores[r * TILE + j + c] = scale * sum(sums[r][c]);
  }
}

// state = fade state + sum over entries of weights times values, for R rows.
template <int R, int C>
void mix(const float* weights, const float* fades, const Tile& tile, int count, float* state) {
  for (int64_t i = 0; i < LATENT; i += C * LANES) {
    Vec sums[R][C];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) sums[r][c] = load(state + r * STATE + i + c * LANES) * fades[r];
    for (int j = 0; j < count; ++j) {
      Vec entries[C];
      for (int c = 0; c < C; ++c) entries[c] = load(tile.value[j] + i + c * LANES);
      for (int r = 0; r < R; ++r) {
        const Vec weight = all(weights[r * TILE + j]);
        for (int c = 0; c < C; ++c) sums[r][c] = madd(weight, entries[c], sums[r][c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) store(state + r * STATE + i + c * LANES, sums[r][c]);
  }
}

// Scores of one row become weights; the row's maximum and sum of weights take them in.
// Returns what the row's earlier sums must be multiplied with.
float weigh(float* scores, int count, float* state) {
  std::fill(scores + count, scores + TILE, NOTHING);
  Vec high = load(scores), total = {};
  for (int j = LANES; j < TILE; j += LANES) {
    const Vec x = load(scores + j);
    high = x > high ? x : high;
  }
  float highest = state[HIGH];
  for (int lane = 0; lane < LANES; ++lane) highest = std::max(highest, high[lane]);
  for (int j = 0; j < TILE; j += LANES) {
    const Vec weight = exponential(load(scores + j) - highest);
    store(scores + j, weight);
    total += weight;
  }
  const float fade = highest == state[HIGH] ? 1.0f : exponential(state[HIGH] - highest);
  state[HIGH] = highest;
  state[TOTAL] = state[TOTAL] * fade + sum(total);
  return fade;
}

// R rows over the first `count` entries of a tile; scores of C entries at a time, M vectors of the sums at a time.
template <int R, int C, int M>
void update(const Pointers<PANEL>& rows, int64_t row, const Tile& tile, const Tile* next, int count, float scale,
            float* state) {
  static_assert(TILE % C == 0 && LATENT % (M * LANES) == 0);
  float scores[R * TILE], fades[R];
  const auto compute = next ? score<R, C, true> : score<R, C, false>;
  compute(rows.latent + row, rows.rope + row, tile, next ? *next : tile, count, scale, scores);
  for (int r = 0; r < R; ++r) fades[r] = weigh(scores + r * TILE, count, state + r * STATE);
  mix<R, M>(scores, fades, tile, count, state);
}

// The cache and the queries of a call.
template <typename T>
struct Call {
  const T *query, *query_rope, *key, *key_rope, *value;
  int64_t query_strides[2], query_rope_strides[2], key_strides[2], key_rope_strides[2], value_strides[2];
  const int32_t* table;
  int64_t table_strides[2], block_size, heads;
  float scale;
  bool shared;  // value is key.
};

// Up to PANEL rows of a slot, and where their results go.
struct Panel {
  int64_t slot, token, length, tokens;  // First token of the segment in the batch; KV length; tokens of the segment.
  int64_t row, rows;                    // First row within the segment; rows.
  int64_t chunks;
  int64_t partial;  // Where its chunks are kept when they are computed apart: an index into floats.

  // Entries that a row of the panel sees.
  int64_t sees(int64_t r, int64_t heads) const { return std::max<int64_t>(0, length - tokens + 1 + (row + r) / heads); }
};

// What a thread works in, from a cache line's beginning; kept between calls.
float* workspace(int64_t size) {
  static thread_local std::vector<float> kept;
  if (static_cast<int64_t>(kept.size()) < size + 16) kept.resize(size + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(kept.data()) + 63) & ~uintptr_t{63});
}

// What a thread does for one panel. Float32 is read where it lies, half types are widened into the workspace.
template <typename T>
struct Worker {
  static constexpr bool EXACT = std::is_same_v<T, float>;
  const Call<T>& call;
  const Panel& panel;
  float *first, *second, *queries, *entries;
  int64_t sees[PANEL];
  Pointers<PANEL> rows;

  Worker(const Call<T>& call, const Panel& panel) : call(call), panel(panel) {
    const int64_t states = panel.rows * STATE, wide = EXACT ? 0 : panel.rows * WIDTH;
    first = workspace(2 * states + wide + TILE * (WIDTH + LATENT));
    second = first + states;
    queries = second + states;
    entries = queries + wide;
    for (int64_t r = 0; r < panel.rows; ++r) {
      const int64_t token = panel.token + (panel.row + r) / call.heads, head = (panel.row + r) % call.heads;
      read(call.query + token * call.query_strides[0] + head * call.query_strides[1],
           call.query_rope + token * call.query_rope_strides[0] + head * call.query_rope_strides[1], rows, r, queries);
      sees[r] = panel.sees(r, call.heads);
    }
  }

  template <int64_t SIZE>
  static void read(const T* latent, const T* rope, Pointers<SIZE>& to, int64_t index, float* room) {
    if constexpr (EXACT) {
      to.latent[index] = latent;
      to.rope[index] = rope;
    } else {
      to.latent[index] = widen(latent, LATENT, room + index * WIDTH);
      to.rope[index] = widen(rope, ROPE, room + index * WIDTH + LATENT);
    }
  }

  static const float* widen(const T* from, int64_t size, float* to) {
    for (int64_t i = 0; i < size; ++i) to[i] = static_cast<float>(from[i]);
    return to;
  }

  // The entries from `begin` on, `count` of them. Scores are computed a few at a time: what is beyond the last repeats
  // it, and is not looked at.
  void read(int64_t begin, int64_t count, Tile& tile) const {
    const int32_t* table = call.table + panel.slot * call.table_strides[0];
    int64_t block = begin / call.block_size, within = begin % call.block_size;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t id = table[block * call.table_strides[1]];
      read(call.key + id * call.key_strides[0] + within * call.key_strides[1],
           call.key_rope + id * call.key_rope_strides[0] + within * call.key_rope_strides[1], tile, j, entries);
      if (call.shared) {
        tile.value[j] = tile.latent[j];
      } else {
        const T* value = call.value + id * call.value_strides[0] + within * call.value_strides[1];
        if constexpr (EXACT) {
          tile.value[j] = value;
        } else {
          tile.value[j] = widen(value, LATENT, entries + TILE * WIDTH + j * LATENT);
        }
      }
      if (++within == call.block_size) ++block, within = 0;
    }
    std::fill(tile.latent + count, tile.latent + TILE, tile.latent[count - 1]);
    std::fill(tile.rope + count, tile.rope + TILE, tile.rope[count - 1]);
  }

  // All rows over the entries of a chunk, into state [rows, STATE].
  void chunk(int64_t index, float* state) const {
    for (int64_t r = 0; r < panel.rows; ++r) {
      std::fill(state + r * STATE, state + (r + 1) * STATE, 0.0f);
      state[r * STATE + HIGH] = NOTHING;
    }
    const int64_t seen = sees[panel.rows - 1], end = std::min((index + 1) * CHUNK, seen);
    const auto count = [&](int64_t begin) { return std::min<int64_t>(TILE, seen - begin); };
    Tile tiles[2];
    int64_t begin = index * CHUNK, from = 0;
    if (begin < end) read(begin, count(begin), tiles[0]);
    for (int turn = 0; begin < end; begin += TILE, turn ^= 1) {
      const Tile &tile = tiles[turn], *next = nullptr;
      if constexpr (EXACT) {
        if (begin + TILE < seen) {
          read(begin + TILE, count(begin + TILE), tiles[turn ^ 1]);
          next = &tiles[turn ^ 1];
        }
      } else if (begin != index * CHUNK) {
        read(begin, count(begin), tiles[turn]);
      }
      while (sees[from] <= begin) ++from;
      for (int64_t r = from; r < panel.rows;) {
        // Rows that see the same part of the tile; in the last tiles of a slot those are the heads of one token.
        const auto part = [&](int64_t r) { return static_cast<int>(std::min<int64_t>(TILE, sees[r] - begin)); };
        const int visible = part(r);
        int64_t alike = 1;
        while (alike < 4 && r + alike < panel.rows && part(r + alike) == visible) ++alike;
        alike = alike == 3 ? 2 : alike;
        const auto go = alike == 4 ? update<4, 3, 2> : alike == 2 ? update<2, 6, 4> : update<1, 12, 8>;
        go(rows, r, tile, r == from ? next : nullptr, visible, call.scale, state + r * STATE);
        r += alike;
      }
    }
  }

  // Takes the next chunk into the sums of those before it.
  void fold(float* state, const float* next) const {
    for (int64_t r = 0; r < panel.rows; ++r, state += STATE, next += STATE) {
      if (next[TOTAL] == 0.0f) continue;  // The row sees nothing of that chunk.
      const float highest = std::max(state[HIGH], next[HIGH]);
      const float old = exponential(state[HIGH] - highest), young = exponential(next[HIGH] - highest);
      for (int64_t i = 0; i < LATENT; i += LANES) {
        store(state + i, madd(load(next + i), all(young), load(state + i) * old));
      }
      state[HIGH] = highest;
      state[TOTAL] = state[TOTAL] * old + next[TOTAL] * young;
    }
  }

  void finish(const float* state, T* out) const {
    out += (panel.token * call.heads + panel.row) * LATENT;
    for (int64_t r = 0; r < panel.rows; ++r, state += STATE, out += LATENT) {
      const float total = sees[r] > 0 ? state[TOTAL] : 1.0f;  // A row that sees nothing has sums of 0.
      for (int64_t i = 0; i < LATENT; ++i) out[i] = static_cast<T>(state[i] / total);
    }
  }
};

template <typename T>
void run(const Call<T>& call, std::vector<Panel>& panels, T* out) {
  int64_t partials = 0, work = 0;
  for (Panel& panel : panels) {
    panel.partial = partials;
    partials += panel.rows * panel.chunks * STATE;
    work += panel.rows * panel.length;
  }
  const int64_t threads = work < SMALL ? 1 : at::get_num_threads(), count = panels.size();
  if (threads == 1 || count >= 2 * threads || partials > MOST_PARTIALS) {
    at::parallel_for(0, count, threads == 1 ? count : 1, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        Worker<T> worker(call, panels[p]);
        worker.chunk(0, worker.first);
        for (int64_t index = 1; index < panels[p].chunks; ++index) {
          worker.chunk(index, worker.second);
          worker.fold(worker.first, worker.second);
        }
        worker.finish(worker.first, out);
      }
    });
    return;
  }
  // Few slots: threads share the chunks of a slot, which are folded afterwards, in the same order as above.
  std::vector<std::pair<const Panel*, int64_t>> tasks;
  for (const Panel& panel : panels)
    for (int64_t index = 0; index < panel.chunks; ++index) tasks.emplace_back(&panel, index);
  const auto kept = std::make_unique_for_overwrite<float[]>(partials);
  const auto where = [&](const Panel& panel, int64_t index) {
    return kept.get() + panel.partial + index * panel.rows * STATE;
  };
  at::parallel_for(0, tasks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto [panel, index] = tasks[i];
      Worker<T>(call, *panel).chunk(index, where(*panel, index));
    }
  });
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const Worker<T> worker(call, panels[p]);
      float* state = where(panels[p], 0);
      for (int64_t index = 1; index < panels[p].chunks; ++index) worker.fold(state, where(panels[p], index));
      worker.finish(state, out);
    }
  });
}

template <typename T>
void attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& query_rope,
            const at::Tensor& key_rope, const at::Tensor& table, std::vector<Panel>& panels, double scale,
            at::Tensor& out) {
  const Call<T> call{query.const_data_ptr<T>(),
                     query_rope.const_data_ptr<T>(),
                     key.const_data_ptr<T>(),
                     key_rope.const_data_ptr<T>(),
                     value.const_data_ptr<T>(),
                     {query.stride(0), query.stride(1)},
                     {query_rope.stride(0), query_rope.stride(1)},
                     {key.stride(0), key.stride(1)},
                     {key_rope.stride(0), key_rope.stride(1)},
                     {value.stride(0), value.stride(1)},
                     table.const_data_ptr<int32_t>(),
                     {table.stride(0), table.stride(1)},
                     key.size(1),
                     query.size(1),
                     static_cast<float>(scale),
                     value.const_data_ptr() == key.const_data_ptr() && value.strides() == key.strides()};
  run(call, panels, out.mutable_data_ptr<T>());
}

#define WANT(good, name, ...) TORCH_CHECK_VALUE(good, name ": ", __VA_ARGS__)
#define WANT_LIKE(tensor, model, type)                                                                        \
  WANT(tensor.scalar_type() == type, #tensor, "must be ", type, " like " model ", not ", tensor.scalar_type()); \
  WANT(tensor.device().is_cpu(), #tensor, "must be on the CPU, not on ", tensor.device());                    \
  WANT(tensor.stride(-1) == 1, #tensor, "the last dimension must be contiguous, its stride is ", tensor.stride(-1))

at::Tensor fused_infer_attention_score(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                       const at::Tensor& query_rope, const at::Tensor& key_rope,
                                       const std::optional<at::Tensor>& atten_mask, at::IntArrayRef ends,
                                       at::IntArrayRef lengths, const at::Tensor& block_table, int64_t num_heads,
                                       double scale, int64_t num_key_value_heads, std::string_view input_layout,
                                       int64_t sparse_mode, int64_t block_size) {
  WANT(input_layout == "TND", "input_layout", "only TND, not ", input_layout);
  WANT(sparse_mode == 3, "sparse_mode", "only 3 (causal), not ", sparse_mode);
  WANT(num_key_value_heads == 1, "num_key_value_heads", "MLA has 1, not ", num_key_value_heads);
  const auto type = query.scalar_type();
  WANT(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, "query",
       "must be float32, bfloat16 or float16, not ", type);
  WANT(query.dim() == 3 && query.size(2) == LATENT, "query", "must be [T, N, 512], not ", query.sizes());
  const int64_t tokens = query.size(0), heads = query.size(1), blocks = key.size(0), slots = ends.size();
  WANT(heads == num_heads, "num_heads", num_heads, ", but query has ", heads);
  WANT(query_rope.sizes() == at::IntArrayRef({tokens, heads, ROPE}), "query_rope", "must be [", tokens, ", ", heads,
       ", 64], not ", query_rope.sizes());
  WANT(key.dim() == 3 && key.size(2) == LATENT, "key", "must be [blocks, block_size, 512], not ", key.sizes());
  WANT(key.size(1) == block_size && block_size > 0, "block_size", block_size, ", but key has ", key.size(1));
  WANT(key_rope.sizes() == at::IntArrayRef({blocks, block_size, ROPE}), "key_rope", "must be [", blocks, ", ",
       block_size, ", 64], not ", key_rope.sizes());
  WANT(value.sizes() == key.sizes(), "value", "must be ", key.sizes(), " like key, not ", value.sizes());
  WANT_LIKE(query, "query", type);
  WANT_LIKE(query_rope, "query", type);
  WANT_LIKE(key, "query", type);
  WANT_LIKE(key_rope, "query", type);
  WANT_LIKE(value, "query", type);
  WANT(block_table.scalar_type() == at::kInt && block_table.device().is_cpu(), "block_table",
       "must be int32 on the CPU, not ", block_table.scalar_type());
  WANT(block_table.dim() == 2 && block_table.size(0) == slots, "block_table", "must be [", slots, ", P], not ",
       block_table.sizes());
  if (atten_mask) {
    WANT(atten_mask->sizes() == at::IntArrayRef({2048, 2048}), "atten_mask", "must be [2048, 2048], not ",
         atten_mask->sizes());
  }
  WANT(static_cast<int64_t>(lengths.size()) == slots, "actual_seq_lengths_kv", lengths.size(), " entries for ", slots,
       " slots");

  at::Tensor out = query.new_empty({tokens, heads, LATENT});
  std::vector<Panel> panels;
  panels.reserve(slots);
  const int32_t* table = block_table.const_data_ptr<int32_t>();
  const int64_t room = block_table.size(1) * block_size;
  const int64_t bytes = heads * LATENT * out.element_size();
  int64_t begin = 0;
  for (int64_t slot = 0; slot < slots; begin = ends[slot++]) {
    const int64_t length = lengths[slot], count = ends[slot] - begin;
    WANT(count >= 0 && ends[slot] <= tokens, "actual_seq_lengths",
         "prefix sums must not fall, nor be negative, nor exceed T = ", tokens, "; entry ", slot, " is ", ends[slot]);
    WANT(length >= 0 && length <= room, "actual_seq_lengths_kv", "must be in 0..", room,
         ", what a row of block_table has room for; entry ", slot, " is ", length);
    if (length == 0 && count > 0) {
      std::memset(static_cast<char*>(out.mutable_data_ptr()) + begin * bytes, 0, count * bytes);
    }
    if (length == 0 || count == 0) continue;
    const int32_t* row = table + slot * block_table.stride(0);
    for (int64_t block = 0; block * block_size < length; ++block) {
      const int32_t id = row[block * block_table.stride(1)];
      WANT(id >= 0 && id < blocks, "block_table", "id ", id, " in use by slot ", slot, " is not in 0..", blocks - 1);
    }
    for (int64_t first = 0; first < count * heads; first += PANEL) {
      Panel panel{slot, begin, length, count, first, std::min(PANEL, count * heads - first), 1, 0};
      panel.chunks = std::max<int64_t>(1, (panel.sees(panel.rows - 1, heads) + CHUNK - 1) / CHUNK);
      panels.push_back(panel);
    }
  }
  WANT(begin == tokens, "actual_seq_lengths", "the last must equal T = ", tokens, ", not ", begin);
  if (panels.empty()) return out;
  const auto go = type == at::kFloat ? attend<float> : type == at::kHalf ? attend<at::Half> : attend<at::BFloat16>;
  go(query, key, value, query_rope, key_rope, block_table, panels, scale, out);
  return out;
}

void write_latent_kv(const at::Tensor& kv_c, const at::Tensor& k_pe, const at::Tensor& cache,
                     const at::Tensor& slot_mapping) {
  WANT(kv_c.dim() == 2, "kv_c", "must be [T, D], not ", kv_c.sizes());
  const int64_t tokens = kv_c.size(0), latent = kv_c.size(1), dims = k_pe.dim();
  WANT((dims == 2 || (dims == 3 && k_pe.size(1) == 1)) && k_pe.size(0) == tokens, "k_pe", "must be [", tokens,
       ", R], not ", k_pe.sizes());
  const int64_t rope = k_pe.size(-1);
  WANT(cache.dim() == 3 && cache.size(2) == latent + rope, "cache", "must be [blocks, block_size, ", latent + rope,
       "], not ", cache.sizes());
  const auto type = cache.scalar_type();
  WANT_LIKE(cache, "cache", type);
  WANT_LIKE(kv_c, "cache", type);
  WANT_LIKE(k_pe, "cache", type);
  const auto index = slot_mapping.scalar_type();
  WANT(slot_mapping.dim() == 1 && slot_mapping.size(0) == tokens, "slot_mapping", "must be [", tokens, "], not ",
       slot_mapping.sizes());
  WANT((index == at::kLong || index == at::kInt) && slot_mapping.device().is_cpu(), "slot_mapping",
       "must be int64 or int32 on the CPU, not ", index);

  const int64_t size = cache.size(1), rows = cache.size(0) * size, item = cache.element_size();
  const auto slot = [&](int64_t token) -> int64_t {
    const int64_t at = token * slot_mapping.stride(0);
    return index == at::kLong ? slot_mapping.const_data_ptr<int64_t>()[at] : slot_mapping.const_data_ptr<int32_t>()[at];
  };
  for (int64_t token = 0; token < tokens; ++token) {
    TORCH_CHECK_INDEX(slot(token) < rows, "slot_mapping: ", slot(token), " is not a row of cache, which has ", rows);
  }
  const auto* from = static_cast<const char*>(kv_c.const_data_ptr());
  const auto* from_rope = static_cast<const char*>(k_pe.const_data_ptr());
  auto* to = static_cast<char*>(cache.mutable_data_ptr());
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t row = slot(token);
    if (row < 0) continue;
    char* target = to + (row / size * cache.stride(0) + row % size * cache.stride(1)) * item;
    std::memcpy(target, from + token * kv_c.stride(0) * item, latent * item);
    std::memcpy(target + latent * item, from_rope + token * k_pe.stride(0) * item, rope * item);
  }
}

#undef WANT
#undef WANT_LIKE

}  // namespace

TORCH_LIBRARY_IMPL(mtp_runtime, CPU, library) {
  library.impl("fused_infer_attention_score", &fused_infer_attention_score);
  library.impl("write_latent_kv", &write_latent_kv);
}
