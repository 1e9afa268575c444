// A decode step in C++: only the operations in which PyTorch is several times slower than the
// memory.
//
// One token per row through the model is one call of `forward_step`, and one of `linear` for the
// head. `steps` runs the layers alone. If a cache stores the key and value itself, a layer is two
// calls: `before_cache` and `after_cache`. Activations are fp32 throughout. Weights, cached keys
// and cached values are read once, in their stored format. Every matrix is (N,K) row-major as in
// nn.Linear, so these kernels and torch's large products use the same memory.
//
//     M rows of activations · N outputs · K inputs
//     H query heads · Hk KV heads · G = H / Hk · D head dim

#include <algorithm>
#include <numeric>
#include "products.h"

// --- the rest of a layer -------------------------------------------------------------------------

struct Layer {  // filled by nanokv/fast/native.py
    Weight qkv, o, gate_up, down;
    const float *norm, *q_norm, *k_norm, *mlp_norm;  // q_norm and k_norm may be null
    int64_t H, Hk, D;
    float eps;
    int32_t format;  // of cached keys and values
};

// qkv (M,(H+2·Hk)·D) → q (M,H,D), k and v (M,Hk,D). q and k are normed if the layer has norms for
// them, and rotated; v is copied.
template <class T>
static void split_heads(const Layer& layer, const float* qkv, int64_t M, const float* cos, const float* sin,
                        int64_t rope_stride, float* q, T* k, T* v) {
    int64_t H = layer.H, Hk = layer.Hk, D = layer.D;
#pragma omp parallel for if (M * H * D >= MANY)
    for (int64_t m = 0; m < M; m++) {
        std::vector<float> head(D);
        const float *row = qkv + m * (H + 2 * Hk) * D, *c = cos + m * rope_stride, *s = sin + m * rope_stride;
        for (int64_t h = 0; h < H; h++) place_head(q + (m * H + h) * D, row + h * D, layer.q_norm, c, s, D, layer.eps);
        for (int64_t h = 0; h < Hk; h++) {
            place_head(head.data(), row + (H + h) * D, layer.k_norm, c, s, D, layer.eps);
            for (int64_t i = 0; i < D; i++) {
                store(k + (m * Hk + h) * D + i, head[i]);
                store(v + (m * Hk + h) * D + i, row[(H + Hk + h) * D + i]);
            }
        }
    }
}

// --- attention of one query per row over cached keys and values ----------------------------------
//
// FlashDecoding: each task is a part of the keys, and the results are merged. Rows may be adjacent
// tokens of one sequence, as in a chunk of a prompt: a task then has several rows, for which a key
// is read once.

// The location of the keys and values of each row. A dense cache (B,Hk,S,D) is one page per row.
struct Pages {
    const void *keys, *values;
    int64_t page_stride, head_stride;  // in values; tokens are D values apart, without gaps
    int64_t page_size;                 // in tokens
    const int32_t* table;              // (sequences,pages), or null: sequence i has page i
    int64_t table_stride;
    const int32_t* lengths;            // (B): how many keys row b sees
    const int32_t* sequence;           // (B): the sequence of row b, or null: row b is sequence b
    const int32_t* first;              // (B): the first key that row b sees, or null: key 0
    int32_t format;                    // FP32 or BF16
};

static inline int64_t sequence_of(const Pages& p, int64_t b) { return p.sequence ? p.sequence[b] : b; }

// The offset of token s of row b, in values from the start of the keys (or values).
static inline int64_t place(const Pages& p, int64_t b, int64_t head, int64_t s, int64_t D) {
    int64_t i = sequence_of(p, b), page = p.table ? p.table[i * p.table_stride + s / p.page_size] : i;
    return page * p.page_stride + head * p.head_stride + s % p.page_size * D;
}

static inline int64_t first_of(const Pages& p, int64_t b) { return p.first ? p.first[b] : 0; }

// Keys per task: the scores fit into the first-level cache, keys and values into the second.
const int PART = 256;

// Prefetch `count` values long before their use, into the second-level cache: the first-level
// cache can have too few requests in flight.
template <class T>
static inline void fetch(const T* from, int64_t count) {
    for (int64_t i = 0; i < count * (int64_t)sizeof(T); i += 64) __builtin_prefetch((const char*)from + i, 0, 2);
}

// scores[g][s] = q_g · k_s for n adjacent keys. Sixteen scores are computed at once, and a key is
// loaded once for G queries. The values v, which are needed after the scores, are prefetched
// meanwhile.
template <class T, int G>
static void score_run(const T* k, const T* v, int64_t n, const float* q, int64_t D, float* scores) {
    const int keys = 16 / G;
    int64_t s = 0;
    for (; s + keys <= n && D % 16 == 0; s += keys) {
        f32x16 sum[16] = {};
        fetch(v + s * D, keys * D);
        for (int64_t d = 0; d < D; d += 16)
#pragma GCC unroll 16
            for (int i = 0; i < keys; i++) {
                f32x16 key = load16(k + (s + i) * D + d);
                for (int g = 0; g < G; g++) sum[g * keys + i] += key * load16(q + g * D + d);
            }
        f32x16 all = sums16(sum);
        for (int g = 0; g < G; g++) memcpy(scores + g * PART + s, (char*)&all + g * keys * sizeof(float), keys * sizeof(float));
    }
    for (; s < n; s++)
        for (int g = 0; g < G; g++) scores[g * PART + s] = dot(k + s * D, q + g * D, D);
}

// out[g] += Σ_s p[g][s] · v_s, for four tokens at a time, so that the sums are loaded and stored
// a quarter as often. The keys of the next task are prefetched meanwhile.
template <class T, int G>
static void mix_run(const T* v, const T* next, int64_t n, const float* p, int64_t D, float* out) {
    int64_t s = 0;
    for (; s + 4 <= n && D % 16 == 0; s += 4) {
        if (next) fetch(next + s * D, 4 * D);
        for (int64_t d = 0; d < D; d += 16) {
            const T* at = v + s * D + d;
            f32x16 a = load16(at), b = load16(at + D), c = load16(at + 2 * D), e = load16(at + 3 * D);
            for (int g = 0; g < G; g++) {
                const float* w = p + g * PART + s;
                float* to = out + g * D + d;
                store16(to, load16(to) + ((w[0] * a + w[1] * b) + (w[2] * c + w[3] * e)));
            }
        }
    }
    for (; s < n; s++)
        for (int g = 0; g < G; g++)
            for (int64_t d = 0; d < D; d++) out[g * D + d] += p[g * PART + s] * to_float(v[s * D + d]);
}

// Keys from … to−1 of one KV head, for the queries of `rows` adjacent rows from b on. `run`: at most so
// many adjacent tokens are read at once; a page or a part of one.
struct Task {
    int64_t b, rows, head, from, to, run;
};

// The G queries of one row, with a softmax over the keys of a task. `attention` merges the tasks.
template <class T, int G>
static void attend_part(const Pages& p, const Task& task, const Task* next, const float* q, int64_t D, float* out,
                        float* largest, float* total) {
    float scores[G * PART];
    int64_t from = task.from, to = task.to;
    auto at = [&](const void* base, int64_t s) { return (const T*)base + place(p, task.b, task.head, s, D); };
    auto run = [&](int64_t s) {  // how many tokens from s on are contiguous
        int64_t left = task.run - s % task.run;
        return to - s < left ? to - s : left;
    };
    auto then = [&](int64_t s) {  // the key of the next task at the same position within the task
        if (!next || s - from >= next->to - next->from) return (const T*)nullptr;
        return (const T*)p.keys + place(p, next->b, next->head, next->from + s - from, D);
    };
    for (int64_t s = from; s < to; s += run(s))
        score_run<T, G>(at(p.keys, s), at(p.values, s), run(s), q, D, &scores[s - from]);
    for (int g = 0; g < G; g++) {
        float *row = &scores[g * PART], most = -INFINITY;
        f32x16 sum = {};
        for (int64_t s = 0; s < to - from; s++) most = row[s] > most ? row[s] : most;
        // Pad the last vector with scores whose weights are almost 0.
        for (int64_t s = to - from; s % 16; s++) row[s] = most - 1000;
        for (int64_t s = 0; s < to - from; s += 16) {
            f32x16 e = exp16(load16(row + s) - most);
            store16(row + s, e);
            sum += e;
        }
        largest[g] = most, total[g] = sum16(sum);
    }
    memset(out, 0, G * D * sizeof(float));
    for (int64_t s = from; s < to; s += run(s)) mix_run<T, G>(at(p.values, s), then(s), run(s), &scores[s - from], D, out);
}

// All G queries of one row and KV head, up to 4 at a time.
template <class T>
static void attend_head(const Pages& p, const Task& task, const Task* next, const float* q, int64_t G, int64_t D,
                        float* out, float* largest, float* total) {
    for (int64_t g = 0; g < G;) {
        int count = G - g >= 4 ? 4 : (int)(G - g);
        auto pair = count == 2 ? attend_part<T, 2> : attend_part<T, 1>;
        auto part = count == 4 ? attend_part<T, 4> : count == 3 ? attend_part<T, 3> : pair;
        part(p, task, g ? nullptr : next, q + g * D, D, out + g * D, largest + g, total + g);
        g += count;
    }
}

// --- the same for adjacent rows of one sequence --------------------------------------------------
//
// Each lane of a vector is a query, so no sum crosses lanes, and the softmax has a running maximum
// per lane (FlashAttention). A number of a key or value is broadcast to all lanes, and with bf16
// products a pair of numbers: adjacent ones of a key, those of adjacent values.

const int FEW = 8;      // queries: fewer leave most lanes empty, and their rows are tasks of their own
const int QUERIES = 64; // per task at most
const int KEYS = 32;    // in fp32 they and their values fit into the first-level cache
const int AT_ONCE = LANES == 16 ? 8 : 4;  // sums in registers

struct Singles {  // products in fp32
    static const int EACH = 1;
    typedef float Number;
    static inline f32x16 add(f32x16 sum, const float* number, f32x16 x) { return sum + *number * x; }
    static void pair_up(f32x16*) {}
    template <class T>
    static void copy_key(const T* from, int64_t D, float* to) {
        for (int64_t d = 0; d < D; d++) to[d] = to_float(from[d]);
    }
    template <class T>
    static void copy_values(const T* const* rows, int64_t D, float* to) { copy_key(rows[0], D, to); }
};

#if defined(__AVX512BF16__)
struct Pairs {
    static const int EACH = 2;
    typedef bf16 Number;
    static inline f32x16 add(f32x16 sum, const float* numbers, f32x16 x) {
        int32_t two;
        memcpy(&two, numbers, 4);
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)_mm512_set1_epi32(two));
    }
    static inline __m512i rounded(f32x16 v) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)); }
    static void pair_up(f32x16* p) {  // KEYS weights → KEYS / 2 pairs of weights
        for (int s = 0; s < KEYS; s += 2)
            p[s / 2] = (f32x16)_mm512_or_si512(rounded(p[s]), _mm512_slli_epi32(rounded(p[s + 1]), 16));
    }
    static void copy_key(const bf16* from, int64_t D, float* to) { memcpy(to, from, D * sizeof(bf16)); }
    static void copy_values(const bf16* const* rows, int64_t D, float* to) {
        for (int64_t d = 0; d < D; d++) {
            uint32_t two = rows[0][d].bits | (uint32_t)rows[1][d].bits << 16;
            memcpy(to + d, &two, 4);
        }
    }
};
typedef Pairs OfBf16;
#else
typedef Singles OfBf16;
#endif

// scores[s] = q · k_s for KEYS keys: q (steps,16), k (KEYS,steps)
template <class Form>
static void score_lanes(const float* q, const float* k, int64_t steps, f32x16* scores) {
    for (int s = 0; s < KEYS; s += AT_ONCE) {
        f32x16 sum[AT_ONCE] = {};
        for (int64_t d = 0; d < steps; d++) {
            f32x16 x = load16(q + 16 * d);
#pragma GCC unroll 8
            for (int i = 0; i < AT_ONCE; i++) sum[i] = Form::add(sum[i], k + (s + i) * steps + d, x);
        }
        for (int i = 0; i < AT_ONCE; i++) scores[s + i] = sum[i];
    }
}

// N dims: out (N,16) = out · keep + Σ_s p[s] · v_s, v (KEYS / EACH,D)
template <class Form, int N>
static void mix_lanes(const f32x16* p, const float* v, int64_t D, f32x16 keep, float* out) {
    f32x16 sum[N];
    for (int i = 0; i < N; i++) sum[i] = load16(out + 16 * i) * keep;
    for (int s = 0; s < KEYS / Form::EACH; s++) {
        f32x16 weight = p[s];
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) sum[i] = Form::add(sum[i], v + s * D + i, weight);
    }
    for (int i = 0; i < N; i++) store16(out + 16 * i, sum[i]);
}

// Up to 16 queries, one per lane, with what they have summed so far.
template <class Form>
struct Lanes {
    std::vector<float> q;    // (D / EACH,16), each one number or a pair
    std::vector<float> out;  // (D,16)
    f32x16 most = (f32x16){} - 1e30f, total = {};
    int64_t seen[16];        // how many keys each query sees
    Lanes(int64_t D) : q(16 * D / Form::EACH), out(16 * D) {}

    // n ≤ KEYS keys and values from position `from` on
    void add(const float* k, const float* v, int64_t from, int64_t n, int64_t D) {
        f32x16 scores[KEYS], high = most, sum = {};
        score_lanes<Form>(q.data(), k, D / Form::EACH, scores);
        for (int lane = 0; lane < 16; lane++)
            for (int64_t s = std::clamp(seen[lane] - from, (int64_t)0, n); s < KEYS; s++)
                ((float*)&scores[s])[lane] = -1e30f;
        for (int s = 0; s < KEYS; s++) high = max16(scores[s], high);
        f32x16 keep = exp16(most - high);
        for (int s = 0; s < KEYS; s++) {
            scores[s] = exp16(scores[s] - high);
            sum += scores[s];
        }
        total = total * keep + sum, most = high;
        Form::pair_up(scores);
        int64_t d = 0;
        for (; d + AT_ONCE <= D; d += AT_ONCE) mix_lanes<Form, AT_ONCE>(scores, v + d, D, keep, &out[16 * d]);
        for (; d < D; d++) mix_lanes<Form, 1>(scores, v + d, D, keep, &out[16 * d]);
    }
};

// The queries of a task with several rows: query g of row r is at q + r · stride + g · D.
template <class T, class Form>
static void attend_rows(const Pages& p, const Task& task, const float* q, int64_t stride, int64_t G, int64_t D,
                        std::vector<Lanes<Form>>& all) {
    const int EACH = Form::EACH;
    for (int64_t i = 0; i < 16 * (int64_t)all.size(); i++) {
        int64_t row = i / G < task.rows ? i / G : 0, lane = i % 16;
        auto* to = (typename Form::Number*)all[i / 16].q.data();
        all[i / 16].seen[lane] = p.lengths[task.b + row];
        for (int64_t d = 0; d < D && i < task.rows * G; d++)
            store(to + (d / EACH * 16 + lane) * EACH + d % EACH, q[row * stride + i % G * D + d]);
    }
    std::vector<float> keys(KEYS * D / EACH), values(KEYS * D / EACH);
    std::vector<T> zeros(D);  // behind the last value, because others may be infinite
    for (int64_t from = task.from; from < task.to; from += KEYS) {
        int64_t n = task.to - from < KEYS ? task.to - from : KEYS;
        const T* rows[KEYS];
        for (int64_t s = 0; s < KEYS; s++) {
            int64_t at = s < n ? place(p, task.b, task.head, from + s, D) : 0;
            if (s < n) Form::copy_key((const T*)p.keys + at, D, &keys[s * D / EACH]);
            rows[s] = s < n ? (const T*)p.values + at : zeros.data();
        }
        for (int64_t s = 0; s < KEYS; s += EACH) Form::copy_values(rows + s, D, &values[s / EACH * D]);
        for (auto& lanes : all) lanes.add(keys.data(), values.data(), from, n, D);
    }
}

// The same, with the results where `attention` merges them: those of query i at place(i).
template <class T, class Form, class Place>
static void attend_task(const Pages& p, const Task& task, const float* q, int64_t stride, int64_t G, int64_t D, Place place,
                        float* out, float* largest, float* total) {
    int64_t count = task.rows * G;
    std::vector<Lanes<Form>> all((count + 15) / 16, Lanes<Form>(D));
    attend_rows<T, Form>(p, task, q, stride, G, D, all);
    for (int64_t i = 0; i < count; i++) {
        auto& lanes = all[i / 16];
        int64_t to = place(i), lane = i % 16;
        for (int64_t d = 0; d < D; d++) out[to * D + d] = lanes.out[16 * d + lane];
        largest[to] = ((float*)&lanes.most)[lane], total[to] = ((float*)&lanes.total)[lane];
    }
}

// How many rows from b on one task takes: adjacent tokens of one sequence.
static int64_t rows_together(const Pages& p, int64_t b, int64_t B, int64_t G) {
    if (p.first) return 1;
    int64_t rows = 1, most = QUERIES / G;
    while (p.sequence && rows < most && b + rows < B && p.sequence[b + rows] == p.sequence[b]) rows++;
    return rows * G < FEW ? 1 : rows;
}

// The runs of FIXED: the same in pages of any multiple of 16 tokens and in a dense cache.
const int64_t FIXED_RUN = 16;

// q (B,H,D) → y (B,H,D): softmax(q kᵀ / √D) v, each key and value read once for its G queries. In FIXED
// each row has tasks of its own. sinks (H), or null: a score beside the keys', whose value is 0.
static void attention(float* y, float* q, int64_t B, int64_t H, int64_t Hk, int64_t D, const Pages& pages, Sums sums,
                      const float* sinks = nullptr) {
    int64_t G = H / Hk, longest = 0;
    for (int64_t b = 0; b < B; b++) longest = std::max(longest, pages.lengths[b] - first_of(pages, b));
    int64_t parts = (longest + PART - 1) / PART;
    std::vector<float> out(B * Hk * parts * G * D), largest(B * Hk * parts * G, -INFINITY), total(B * Hk * parts * G);
    for (int64_t i = 0; i < B * H * D; i++) q[i] /= sqrtf((float)D);
    std::vector<Task> tasks;
    int64_t run = pages.page_size;
    if (sums == FIXED) run = pages.table ? std::gcd(run, FIXED_RUN) : FIXED_RUN;
    for (int64_t b = 0, rows; b < B; b += rows) {
        rows = sums == FIXED ? 1 : rows_together(pages, b, B, G);
        for (int64_t head = 0; head < Hk; head++)
            for (int64_t from = first_of(pages, b), S = pages.lengths[b + rows - 1]; from < S; from += PART)
                tasks.push_back({b, rows, head, from, from + PART < S ? from + PART : S, run});
    }
    // The place of query g of a row and KV head for a part of the keys.
    auto at = [&](int64_t b, int64_t head, int64_t part, int64_t g) { return ((b * Hk + head) * parts + part) * G + g; };
    // some: consecutive tasks of a thread, in which each task prefetches for the next.
    int64_t count = tasks.size(), some = count < 8 ? 1 : count < 32 ? 2 : count < 128 ? 4 : 8;
#pragma omp parallel if (4 * B * Hk * longest * D >= WORTH)
    {
#pragma omp for schedule(dynamic, some)
        for (int64_t i = 0; i < count; i++) {
            const Task& task = tasks[i];
            const Task* next = (i + 1) % some && i + 1 < count ? &task + 1 : nullptr;
            int64_t part = (task.from - first_of(pages, task.b)) / PART, first = at(task.b, task.head, part, 0);
            const float* query = q + (task.b * H + task.head * G) * D;
            if (task.rows == 1) {
                auto f = pages.format == FP32 ? attend_head<float> : attend_head<bf16>;
                f(pages, task, next, query, G, D, &out[first * D], &largest[first], &total[first]);
                continue;
            }
            auto place = [&](int64_t i) { return at(task.b + i / G, task.head, part, i % G); };
            auto f = pages.format == FP32 ? attend_task<float, Singles, decltype(place)>
                                          : attend_task<bf16, OfBf16, decltype(place)>;
            f(pages, task, query, H * D, G, D, place, out.data(), largest.data(), total.data());
        }
#pragma omp for
        for (int64_t i = 0; i < B * H; i++) {  // merge the parts of head i % H of row i / H
            float most = sinks ? sinks[i % H] : -INFINITY, *to = y + i * D;
            auto place = [&](int64_t part) { return at(i / H, i % H / G, part, i % G); };
            for (int64_t part = 0; part < parts; part++) most = fmaxf(most, largest[place(part)]);
            float sum = sinks ? expf(sinks[i % H] - most) : 0;  // once per query, not per part
            for (int64_t d = 0; d < D; d++) to[d] = 0;
            for (int64_t part = 0; part < parts; part++) {
                // A part of NaNs is not skipped: 0 · NaN is NaN.
                float weight = expf(largest[place(part)] - most);
                sum += weight * total[place(part)];
                for (int64_t d = 0; d < D; d++) to[d] += weight * out[place(part) * D + d];
            }
            for (int64_t d = 0; d < D; d++) to[d] /= sum;
        }
    }
}

// --- functions called from Python ----------------------------------------------------------------

thread_local double spent[6];

static void norm_multiply(float* y, const float* x, int64_t M, const float* norm, float eps, const Weight& w,
                          Sums sums) {
    std::vector<float> normed(M * w.K);
#pragma omp parallel for if (M * w.K >= MANY)
    for (int64_t m = 0; m < M; m++) rms_norm(&normed[m * w.K], x + m * w.K, norm, w.K, eps);
    multiply(y, normed.data(), M, w, false, sums);
}

// Norm, one product, head norms, rotation: x (M,C) → q (M,H,D) fp32, k and v (M,Hk,D) in the
// cache's format.
static void before(const Layer& layer, const float* x, int64_t M, const float* cos, const float* sin, int64_t rope_stride,
                   float* q, void* k, void* v, Sums sums) {
    Timer timer(QKV);
    std::vector<float> all(M * layer.qkv.width);
    norm_multiply(all.data(), x, M, layer.norm, layer.eps, layer.qkv, sums);
    if (layer.format == FP32) split_heads(layer, all.data(), M, cos, sin, rope_stride, q, (float*)k, (float*)v);
    else split_heads(layer, all.data(), M, cos, sin, rope_stride, q, (bf16*)k, (bf16*)v);
}

// x (M,C) += o(attention), then x += down(silu(gate) · up) of the normed x. gate and up are the
// halves of one matrix (2·I,C).
static void after(const Layer& layer, float* x, int64_t M, float* q, const Pages& pages, Sums sums) {
    int64_t I = layer.down.K, H = layer.H, D = layer.D;
    std::vector<float> y(M * H * D), both(M * 2 * I), hidden(M * I);
    {
        Timer timer(ATTENTION);
        attention(y.data(), q, M, H, layer.Hk, D, pages, sums);
    }
    {
        Timer timer(O);
        multiply(x, y.data(), M, layer.o, true, sums);
    }
    Timer timer(MLP);
    norm_multiply(both.data(), x, M, layer.mlp_norm, layer.eps, layer.gate_up, sums);
#pragma omp parallel for if (M * I >= MANY)
    for (int64_t m = 0; m < M; m++) {
        const float *gate = &both[m * 2 * I], *up = gate + I;
        int64_t i = 0;
        for (; i + 16 <= I; i += 16) {
            f32x16 g = load16(gate + i);
            store16(&hidden[m * I + i], g / (1 + exp16(-g)) * load16(up + i));
        }
        for (; i < I; i++) hidden[m * I + i] = gate[i] / (1 + expf(-gate[i])) * up[i];
    }
    multiply(x, hidden.data(), M, layer.down, true, sums);
}

extern "C" {

double* times() { return spent; }

// A text that names the instructions in use.
const char* instructions() {
#if defined(TILES)
    return tiles_allowed() ? "AVX-512 bf16, " TILES : "AVX-512 bf16, tiles refused by the system";
#elif defined(__AVX512BF16__)
    return "AVX-512 bf16";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#else
    return "portable";
#endif
}

// y (M,N) = x·wᵀ
void linear(float* y, const float* x, int64_t M, const Weight* w) {
    Timer timer(HEAD);
    multiply(y, x, M, *w, false, FASTEST);
}
void linear_fixed(float* y, const float* x, int64_t M, const Weight* w) {
    Timer timer(HEAD);
    multiply(y, x, M, *w, false, FIXED);
}

// The most rows of activations for which `linear` is faster than torch's product of dense
// weights, measured with the matrices of Qwen3-0.6B. With a row per lane, a prefill of 64 tokens
// is faster by a quarter, one of 128 tokens by 7 %, and one of 256 tokens takes the same time.
// Without bf16 instructions the kernel is faster by a quarter at 64 rows of bf16, and by 5 to 20 %
// at 128. With tiles, more than 32 rows were not measured.
int64_t most_rows(const Weight* w) {
#if defined(__AVX512BF16__)
    bool many = w->K % 32 == 0 && w->N >= 32 && !tiles_allowed();
#elif defined(__AVX2__)
    bool many = w->format == BF16;
#else
    bool many = false;
#endif
    return many ? 128 : 32;
}

// Rows n0 … n1−1 of the weights → (n1−n0,K) in `format`: codes and blocks as fp32 or bf16,
// bf16 weights as fp32.
void dense_rows(void* to, const Weight* w, int64_t n0, int64_t n1, int32_t format) {
    int64_t K = w->K;
#pragma omp parallel for if ((n1 - n0) * K >= WORTH)
    for (int64_t n = n0; n < n1; n++)
        format == FP32 ? table_row((float*)to + (n - n0) * K, *w, n) : unpack((bf16*)to + (n - n0) * K, *w, n);
}

// Attention alone: q (M,H,D), which is overwritten → y (M,H,D).
void attend_step(float* y, float* q, int64_t M, int64_t H, int64_t Hk, int64_t D, const Pages* pages, const float* sinks) {
    Timer timer(ATTENTION);
    attention(y, q, M, H, Hk, D, *pages, FASTEST, sinks);
}

// The two halves of a layer, before and after the cache stores keys and values.
void before_cache(const Layer* layer, const float* x, int64_t M, const float* cos, const float* sin, int64_t rope_stride,
                  float* q, void* k, void* v) {
    before(*layer, x, M, cos, sin, rope_stride, q, k, v, FASTEST);
}
void after_cache(const Layer* layer, float* x, int64_t M, float* q, const Pages* pages) {
    after(*layer, x, M, q, *pages, FASTEST);
}

// The same with FIXED sums. They are not inlined, so that all ways into a layer run the same code.
__attribute__((noinline)) void before_cache_fixed(const Layer* layer, const float* x, int64_t M, const float* cos,
                                                  const float* sin, int64_t rope_stride, float* q, void* k, void* v) {
    before(*layer, x, M, cos, sin, rope_stride, q, k, v, FIXED);
}
__attribute__((noinline)) void after_cache_fixed(const Layer* layer, float* x, int64_t M, float* q, const Pages* pages) {
    after(*layer, x, M, q, *pages, FIXED);
}

// One token per row through a whole layer. The cache has reserved a slot for it: key and value
// are written to the last position.
static void layer_step(const Layer* layer, float* x, int64_t M, const float* cos, const float* sin, int64_t rope_stride,
                       const Pages* p, decltype(before_cache)* first, decltype(after_cache)* second) {
    int64_t Hk = layer->Hk, D = layer->D, size = layer->format == FP32 ? 4 : 2;
    std::vector<float> q(M * layer->H * D), k(M * Hk * D), v(M * Hk * D);  // room for either format
    first(layer, x, M, cos, sin, rope_stride, q.data(), k.data(), v.data());
    for (int64_t b = 0; b < M; b++)
        for (int64_t head = 0; head < Hk; head++) {
            int64_t to = place(*p, b, head, p->lengths[b] - 1, D) * size, from = (b * Hk + head) * D * size;
            memcpy((char*)p->keys + to, (char*)k.data() + from, D * size);
            memcpy((char*)p->values + to, (char*)v.data() + from, D * size);
        }
    second(layer, x, M, q.data(), p);
}

// The same through L layers in one call.
void steps(const Layer* const* layers, int64_t L, float* x, int64_t M, const float* cos, const float* sin,
           int64_t rope_stride, const Pages* const* pages) {
    for (int64_t i = 0; i < L; i++) layer_step(layers[i], x, M, cos, sin, rope_stride, pages[i], before_cache, after_cache);
}
void steps_fixed(const Layer* const* layers, int64_t L, float* x, int64_t M, const float* cos, const float* sin,
                 int64_t rope_stride, const Pages* const* pages) {
    for (int64_t i = 0; i < L; i++)
        layer_step(layers[i], x, M, cos, sin, rope_stride, pages[i], before_cache_fixed, after_cache_fixed);
}

// The whole model without its head: ids (M) → x (M,C), through the embedding table, L layers and
// the final norm.
void forward_step(const Weight* table, const int64_t* ids, const Layer* const* layers, int64_t L, float* x, int64_t M,
                  const float* cos, const float* sin, int64_t rope_stride, const Pages* const* pages, const float* norm,
                  float eps) {
    int64_t C = table->K;
    for (int64_t m = 0; m < M; m++) table_row(x + m * C, *table, ids[m]);
    steps(layers, L, x, M, cos, sin, rope_stride, pages);
    for (int64_t m = 0; m < M; m++) rms_norm(x + m * C, x + m * C, norm, C, eps);
}

}  // extern "C"
