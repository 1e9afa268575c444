// A decode step in C++: what PyTorch is several times slower at than the memory, and nothing else.
//
// One token per row through one layer is one call, `step`, or two where a cache wants the key and the value itself:
// `before_cache` and `after_cache`. Activations are fp32 throughout; weights and cached keys and values are read once, in
// the format in which they are stored. Every matrix is (N,K) row-major, as nn.Linear keeps it, so that one copy serves
// these kernels and torch's own large products alike.
//
//     M rows of activations · N outputs · K inputs · H query heads · Hk KV heads · G = H / Hk · D head dim

#include "vectors.h"

// --- inner products: R rows of weights with one row of activations -----------------------------------------------------

// Four sums, so that no addition waits for the one before it.
template <class T>
static inline float dot(const T* w, const float* x, int64_t K) {
    f32x16 sum[4] = {};
    int64_t k = 0;
    for (; k + 64 <= K; k += 64)
        for (int i = 0; i < 4; i++) sum[i] += load16(w + k + 16 * i) * load16(x + k + 16 * i);
    for (; k + 16 <= K; k += 16) sum[0] += load16(w + k) * load16(x + k);
    float y = sum16((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; k < K; k++) y += to_float(w[k]) * x[k];
    return y;
}

static inline int64_t pairs_of(int64_t K) { return (K + 2 * GROUP - 1) / (2 * GROUP); }  // int4 packs groups in pairs

// Activations in 8 bits, a scale for each group: x ≈ codes · scale.
struct Codes {
    std::vector<int8_t> code;
    std::vector<float> scale, offset;  // offset = scale · (sum of the group's codes): what a zero point of 1 costs
    float total;                       // sum of the offsets
    void quantize(const float* x, int64_t K) {
        int64_t pairs = pairs_of(K);
        code.assign(pairs * 2 * GROUP, 0), scale.assign(pairs * 2, 0), offset.assign(pairs * 2, 0), total = 0;
        for (int64_t g = 0; g < K / GROUP; g++) {
            const float* xg = x + g * GROUP;
            float largest = 0;
            bool finite = true;
            for (int i = 0; i < GROUP; i++) largest = fmaxf(largest, fabsf(xg[i])), finite &= fabsf(xg[i]) <= FLT_MAX;
            float inverse = finite && largest > 1e-30f ? 127 / largest : 0;
            int sum = 0;
            for (int i = 0; i < GROUP; i++) sum += code[g * GROUP + i] = finite ? (int8_t)nearbyintf(xg[i] * inverse) : 0;
            scale[g] = finite ? largest / 127 : NAN;  // no code stands for NaN or infinity: the product becomes NaN
            offset[g] = scale[g] * sum, total += offset[g];
        }
    }
};

// Sums of 4 products in each of 8 lanes: unsigned weights × signed activations, 32 of each, exact in int32.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
typedef __m256i bytes32;
typedef __m256 f32x8;
static inline bytes32 load32(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline bytes32 plus128(bytes32 b) { return _mm256_xor_si256(b, _mm256_set1_epi8((char)128)); }
static inline bytes32 low4(bytes32 b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
static inline bytes32 high4(bytes32 b) { return low4(_mm256_srli_epi16(b, 4)); }
static inline f32x8 zero8() { return _mm256_setzero_ps(); }
static inline void add_products(f32x8& sum, bytes32 w, const int8_t* x, float scale) {
    __m256i products = _mm256_dpbusd_epi32(_mm256_setzero_si256(), w, load32(x));
    sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), _mm256_set1_ps(scale), sum);
}
static inline float sum8(f32x8 a, f32x8 b) {
    return _mm512_reduce_add_ps(_mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1));
}
#else
struct bytes32 { uint8_t b[32]; };
typedef float f32x8;
static inline bytes32 load32(const void* p) { bytes32 v; memcpy(&v, p, 32); return v; }
static inline bytes32 plus128(bytes32 v) { for (auto& b : v.b) b ^= 128; return v; }
static inline bytes32 low4(bytes32 v) { for (auto& b : v.b) b &= 15; return v; }
static inline bytes32 high4(bytes32 v) { for (auto& b : v.b) b >>= 4; return v; }
static inline f32x8 zero8() { return 0; }
static inline void add_products(f32x8& sum, bytes32 w, const int8_t* x, float scale) {
    int products = 0;
    for (int i = 0; i < 32; i++) products += w.b[i] * x[i];
    sum += products * scale;
}
static inline float sum8(f32x8 a, f32x8 b) { return a + b; }
#endif

// int8: one byte per weight, one scale per row. The instruction wants unsigned weights: 128 more, taken back at the end.
static inline float dot_int8(const uint8_t* w, float scale, const Codes& x, int64_t K) {
    f32x8 a = zero8(), b = zero8();
    int64_t k = 0, g = 0;
    for (; k + 64 <= K; k += 64, g += 2) {
        add_products(a, plus128(load32(w + k)), &x.code[k], x.scale[g]);
        add_products(b, plus128(load32(w + k + 32)), &x.code[k + 32], x.scale[g + 1]);
    }
    if (k < K) add_products(a, plus128(load32(w + k)), &x.code[k], x.scale[g]);
    return (sum8(a, b) - 128 * x.total) * scale;
}

// int4: 32 bytes hold two groups, one in the low halves and one in the high ones, stored as code + 8; a bf16 scale per group.
static inline float dot_int4(const uint8_t* w, const bf16* scale, const Codes& x, int64_t K, float* both) {
    int64_t groups = 2 * pairs_of(K);
    float offset = 0;
    for (int64_t g = 0; g < groups; g++) {
        float s = to_float(scale[g]);
        both[g] = s * x.scale[g], offset += s * x.offset[g];
    }
    f32x8 a = zero8(), b = zero8();
    for (int64_t g = 0; g < groups; g += 2) {
        bytes32 pair = load32(w + g * GROUP / 2);
        add_products(a, low4(pair), &x.code[g * GROUP], both[g]);
        add_products(b, high4(pair), &x.code[(g + 1) * GROUP], both[g + 1]);
    }
    return sum8(a, b) - 8 * offset;
}

// --- linear: y (M,N) = x (M,K) · wᵀ, optionally added to what y holds --------------------------------------------------

struct Weight {  // as nanokv/fast/native.py fills it
    const void* data;
    const void* scale;  // INT8: float (N); INT4: bf16 (N,K/32); else null
    const float* bias;  // (N) or null
    int64_t N, K;
    int32_t format;
};

#if defined(__AVX512BF16__)
// One row of bf16 weights with one of activations in bf16: 64 FLOPs an instruction.
static inline float dot_bf16(const bf16* w, const bf16* x, int64_t K) {
    __m512 sum[4] = {};
    for (int64_t k = 0, i = 0; k < K; k += 32, i = (i + 1) % 4)
        sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)_mm512_loadu_si512(w + k), (__m512bh)_mm512_loadu_si512(x + k));
    return _mm512_reduce_add_ps((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// For several rows of activations the arithmetic counts as much as the bytes: 64 FLOPs per instruction, one load for two
// instructions. y[4·c + r] = w_r · x_c for four rows of weights and four of activations. The processor would wait for
// memory and compute in turns. Therefore each step prefetches LINES cache lines of rows that come later.
const int TILE = 4, AHEAD = 8 * TILE;  // rows
template <int LINES>
static inline void tile_bf16(const bf16* w, int64_t rows, const bf16* x, int64_t K, const bf16* ahead, int64_t apart,
                             float* y) {
    const bf16* row[TILE];
    for (int r = 0; r < TILE; r++) row[r] = w + (r < rows ? r : 0) * K;
    f32x16 sum[TILE * TILE] = {};
    for (int64_t k = 0; k < K; k += 32) {
        for (int i = 0; i < LINES; i++) __builtin_prefetch(ahead + i * apart + k, 0, 2);
        __m512bh xk[TILE];
#pragma GCC unroll 4
        for (int c = 0; c < TILE; c++) xk[c] = (__m512bh)_mm512_loadu_si512(x + c * K + k);
#pragma GCC unroll 4
        for (int r = 0; r < TILE; r++) {
            __m512bh wk = (__m512bh)_mm512_loadu_si512(row[r] + k);
#pragma GCC unroll 4
            for (int c = 0; c < TILE; c++)
                sum[TILE * c + r] = (f32x16)_mm512_dpbf16_ps((__m512)sum[TILE * c + r], wk, xk[c]);
        }
    }
    *(f32x16*)y = sums16(sum);
}
#endif

static inline void put(float* y, const Weight& w, int64_t n, float value, bool add) {
    value += w.bias ? w.bias[n] : 0;
    y[n] = add ? y[n] + value : value;
}

struct Input {  // x in the form that the weights' format wants, made once for all threads
    const float* x;
    int64_t M;
    std::vector<Codes> codes;  // int8 and int4
    std::vector<bf16> half;    // bf16, where the processor multiplies it: rounded as torch rounds between two products
    Input(const float* x, int64_t M, const Weight& w) : x(x), M(M) {
        if (w.format >= INT8) {
            codes.resize(M);
            for (int64_t m = 0; m < M; m++) codes[m].quantize(x + m * w.K, w.K);
        }
#if defined(__AVX512BF16__)
        if (w.format == BF16 && w.K % 32 == 0) {
            half.resize((M + TILE - 1) / TILE * TILE * w.K);
            for (int64_t i = 0; i < M * w.K; i += 16) store16(&half[i], load16(x + i));
        }
#endif
    }
};

template <class T>
static void rows_dense(float* y, const Weight& w, const Input& in, int64_t n0, int64_t n1, bool add) {
    const T* data = (const T*)w.data;
    for (int64_t n = n0; n < n1; n++)
        for (int64_t m = 0; m < in.M; m++) put(y + m * w.N, w, n, dot(data + n * w.K, in.x + m * w.K, w.K), add);
}

#if defined(__AVX512BF16__)
// A tile of weights stays in the first-level cache while all rows of activations pass over it, four at a time; the passes
// share the rows that are fetched ahead among them.
static void rows_bf16(float* y, const Weight& w, const Input& in, int64_t n0, int64_t n1, bool add) {
    const bf16* data = (const bf16*)w.data;
    int64_t passes = (in.M + TILE - 1) / TILE, K = w.K;
    auto tile = passes == 1 ? tile_bf16<4> : passes < 4 ? tile_bf16<2> : tile_bf16<1>;
    for (int64_t n = n0; n < n1; n += TILE)
        for (int64_t pass = 0; pass < passes; pass++) {
            float sums[TILE * TILE];
            const bf16* ahead = data + (n + AHEAD + pass % TILE) * K;
            tile(data + n * K, n1 - n, &in.half[pass * TILE * K], K, ahead, passes == 1 ? K : passes * K, sums);
            for (int64_t m = pass * TILE; m < in.M && m < (pass + 1) * TILE; m++)
                for (int64_t r = 0; r < TILE && n + r < n1; r++) put(y + m * w.N, w, n + r, sums[m % TILE * TILE + r], add);
        }
}
#endif

// Rows n0 … n1−1 of the weights; called by every thread with a part of its own.
static void rows(float* y, const Weight& w, const Input& in, int64_t n0, int64_t n1, bool add) {
    int64_t pairs = pairs_of(w.K);
    std::vector<float> both(2 * pairs);
    if (w.format == FP32) return rows_dense<float>(y, w, in, n0, n1, add);
#if defined(__AVX512BF16__)
    const bf16* data = (const bf16*)w.data;
    if (!in.half.empty() && in.M == 1) {
        for (int64_t n = n0; n < n1; n++) put(y, w, n, dot_bf16(data + n * w.K, in.half.data(), w.K), add);
        return;
    }
    if (!in.half.empty()) return rows_bf16(y, w, in, n0, n1, add);
#endif
    if (w.format == BF16) return rows_dense<bf16>(y, w, in, n0, n1, add);
    for (int64_t n = n0; n < n1; n++) {
        for (int64_t m = 0; m < in.M; m++) {
            float value = w.format == INT8
                ? dot_int8((const uint8_t*)w.data + n * w.K, ((const float*)w.scale)[n], in.codes[m], w.K)
                : dot_int4((const uint8_t*)w.data + n * pairs * GROUP, (const bf16*)w.scale + n * pairs * 2, in.codes[m],
                           w.K, both.data());
            put(y + m * w.N, w, n, value, add);
        }
    }
}

// Parts of half a megabyte, handed out as threads ask for them: long enough for the memory to run ahead, and a thread
// that was interrupted holds nobody up for long.
static void multiply(float* y, const float* x, int64_t M, const Weight& w, bool add) {
    Input in(x, M, w);
    const int64_t bytes[] = {4 * w.K, 2 * w.K, w.K, w.K * 9 / 16};
    int64_t part = (1 << 19) / bytes[w.format], most = w.N / 4;
    part = part > most ? most : part;
    part = part < 8 ? 8 : part / 8 * 8;
#pragma omp parallel for schedule(dynamic) if (M * w.N * bytes[w.format] >= WORTH)
    for (int64_t n = 0; n < w.N; n += part) rows(y, w, in, n, n + part < w.N ? n + part : w.N, add);
}

// --- the rest of a layer -----------------------------------------------------------------------------------------------

struct Layer {  // as nanokv/fast/native.py fills it
    Weight qkv, o, gate_up, down;
    const float *norm, *q_norm, *k_norm, *mlp_norm;  // q_norm and k_norm may be null
    int64_t H, Hk, D;
    float eps;
    int32_t format;  // of cached keys and values
};

// qkv (M,(H+2·Hk)·D) → q (M,H,D), k and v (M,Hk,D): q and k normed (if at all) and rotated, v as it is
template <class T>
static void split_heads(const Layer& layer, const float* qkv, int64_t M, const float* cos, const float* sin,
                        int64_t rope_stride, float* q, T* k, T* v) {
    int64_t H = layer.H, Hk = layer.Hk, D = layer.D;
    std::vector<float> head(D);
    for (int64_t m = 0; m < M; m++) {
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

// --- attention of one query a row over cached keys and values (FlashDecoding: parts of the keys, then put together) ----

struct Pages {  // where the keys and values of each row lie; a dense cache (B,Hk,S,D) is one page per row
    const void *keys, *values;
    int64_t page_stride, head_stride;  // in values; a token's D values are contiguous, tokens lie D apart
    int64_t page_size;
    const int32_t* table;    // (B,pages) or null: row b has page b
    int64_t table_stride;
    const int32_t* lengths;  // (B) keys that row b sees
    int32_t format;          // FP32 or BF16
};

// Where token s of row b begins, in values from the start of the keys (or values).
static inline int64_t place(const Pages& p, int64_t b, int64_t head, int64_t s, int64_t D) {
    int64_t page = p.table ? p.table[b * p.table_stride + s / p.page_size] : b;
    return page * p.page_stride + head * p.head_stride + s % p.page_size * D;
}

const int PART = 256;  // keys a task: the scores stay in the first-level cache, keys and values in the second

// Ask for so many values long before their use, into the second-level cache: the first holds too few requests at once.
template <class T>
static inline void fetch(const T* from, int64_t count) {
    for (int64_t i = 0; i < count * (int64_t)sizeof(T); i += 64) __builtin_prefetch((const char*)from + i, 0, 2);
}

// scores[g][s] = q_g · k_s for n keys that lie one after the other; sixteen at once, a key is loaded once for G queries.
// Meanwhile their values v come, which are needed when all scores are there.
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
        for (int g = 0; g < G; g++) memcpy(scores + g * PART + s, (float*)&all + g * keys, keys * sizeof(float));
    }
    for (; s < n; s++)
        for (int g = 0; g < G; g++) scores[g * PART + s] = dot(k + s * D, q + g * D, D);
}

// out[g] += Σ_s p[g][s] · v_s, four values at a time so that the sums are loaded and stored a quarter as often. Meanwhile
// the keys of the next task come.
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
                *(f32x16*)(out + g * D + d) += (w[0] * a + w[1] * b) + (w[2] * c + w[3] * e);
            }
        }
    }
    for (; s < n; s++)
        for (int g = 0; g < G; g++)
            for (int64_t d = 0; d < D; d++) out[g * D + d] += p[g * PART + s] * to_float(v[s * D + d]);
}

struct Task {  // the keys from … to−1 of row b in one KV head
    int64_t b, head, from, to;
};

// G queries of a task: a softmax of its own, put together with the others afterwards.
template <class T, int G>
static void attend_part(const Pages& p, const Task& task, const Task* next, const float* q, int64_t D, float* out,
                        float* largest, float* total) {
    float scores[G * PART];
    int64_t from = task.from, to = task.to;
    auto at = [&](const void* base, int64_t s) { return (const T*)base + place(p, task.b, task.head, s, D); };
    auto run = [&](int64_t s) {  // how many tokens from s on lie in one piece
        int64_t left = p.page_size - s % p.page_size;
        return to - s < left ? to - s : left;
    };
    auto then = [&](int64_t s) {  // the key of the next task that has the place of s in this one
        if (!next || s - from >= next->to - next->from) return (const T*)nullptr;
        return (const T*)p.keys + place(p, next->b, next->head, next->from + s - from, D);
    };
    for (int64_t s = from; s < to; s += run(s))
        score_run<T, G>(at(p.keys, s), at(p.values, s), run(s), q, D, &scores[s - from]);
    for (int g = 0; g < G; g++) {
        float *row = &scores[g * PART], most = -INFINITY;
        f32x16 sum = {};
        for (int64_t s = 0; s < to - from; s++) most = row[s] > most ? row[s] : most;
        for (int64_t s = to - from; s % 16; s++) row[s] = most - 1000;  // fills up the last vector with next to nothing
        for (int64_t s = 0; s < to - from; s += 16) sum += *(f32x16*)(row + s) = exp16(load16(row + s) - most);
        largest[g] = most, total[g] = sum16(sum);
    }
    memset(out, 0, G * D * sizeof(float));
    for (int64_t s = from; s < to; s += run(s)) mix_run<T, G>(at(p.values, s), then(s), run(s), &scores[s - from], D, out);
}

// All G queries of a KV head: as many at once as there are, or 4, 2, 1.
template <class T>
static void attend_head(const Pages& p, const Task& task, const Task* next, const float* q, int64_t G, int64_t D,
                        float* out, float* largest, float* total) {
    for (int64_t g = 0; g < G;) {
        int count = G - g >= 4 ? 4 : G - g >= 2 ? 2 : 1;
        auto part = count == 4 ? attend_part<T, 4> : count == 2 ? attend_part<T, 2> : attend_part<T, 1>;
        part(p, task, g ? nullptr : next, q + g * D, D, out + g * D, largest + g, total + g);
        g += count;
    }
}

// q (B,H,D) → y (B,H,D): softmax(q kᵀ / √D) v, each key and value read once for its G queries
static void attention(float* y, float* q, int64_t B, int64_t H, int64_t Hk, int64_t D, const Pages& pages) {
    int64_t G = H / Hk, longest = 0;
    for (int64_t b = 0; b < B; b++) longest = pages.lengths[b] > longest ? pages.lengths[b] : longest;
    int64_t parts = (longest + PART - 1) / PART;
    std::vector<float> out(B * Hk * parts * G * D), largest(B * Hk * parts * G, -INFINITY), total(B * Hk * parts * G);
    for (int64_t i = 0; i < B * H * D; i++) q[i] /= sqrtf((float)D);
    std::vector<Task> tasks;
    for (int64_t row = 0; row < B * Hk; row++)
        for (int64_t from = 0, S = pages.lengths[row / Hk]; from < S; from += PART)
            tasks.push_back({row / Hk, row % Hk, from, from + PART < S ? from + PART : S});
    int64_t count = tasks.size(), some = count < 8 ? 1 : count < 32 ? 2 : count < 128 ? 4 : 8;  // in a row: each fetches for the next one
#pragma omp parallel if (4 * B * Hk * longest * D >= WORTH)
    {
#pragma omp for schedule(dynamic, some)
        for (int64_t i = 0; i < count; i++) {
            const Task& task = tasks[i];
            const Task* next = (i + 1) % some && i + 1 < count ? &task + 1 : nullptr;
            int64_t row = task.b * Hk + task.head, at = (row * parts + task.from / PART) * G;
            auto f = pages.format == FP32 ? attend_head<float> : attend_head<bf16>;
            f(pages, task, next, q + row * G * D, G, D, &out[at * D], &largest[at], &total[at]);
        }
#pragma omp for
        for (int64_t i = 0; i < B * H; i++) {  // the parts of head i % H of row i / H, put together
            float most = -INFINITY, sum = 0, *to = y + i * D;
            auto at = [&](int64_t part) { return (i / G * parts + part) * G + i % G; };
            for (int64_t part = 0; part < parts; part++) most = fmaxf(most, largest[at(part)]);
            for (int64_t d = 0; d < D; d++) to[d] = 0;
            for (int64_t part = 0; part < parts; part++) {
                float weight = expf(largest[at(part)] - most);  // a part that holds nothing but NaN counts too: 0 · NaN
                sum += weight * total[at(part)];
                for (int64_t d = 0; d < D; d++) to[d] += weight * out[at(part) * D + d];
            }
            for (int64_t d = 0; d < D; d++) to[d] /= sum;
        }
    }
}

// --- what Python calls -------------------------------------------------------------------------------------------------

thread_local double spent[6];

static void norm_multiply(float* y, const float* x, int64_t M, const float* norm, float eps, const Weight& w) {
    std::vector<float> normed(M * w.K);
    for (int64_t m = 0; m < M; m++) rms_norm(&normed[m * w.K], x + m * w.K, norm, w.K, eps);
    multiply(y, normed.data(), M, w, false);
}

extern "C" {

double* times() { return spent; }

// y (M,N) = x·wᵀ
void linear(float* y, const float* x, int64_t M, const Weight* w) {
    Timer timer(HEAD);
    multiply(y, x, M, *w, false);
}

// x (M,C) → q (M,H,D) fp32 and k, v (M,Hk,D) in the cache's format: norm, one product, head norms, rotation
void before_cache(const Layer* layer, const float* x, int64_t M, const float* cos, const float* sin, int64_t rope_stride,
                  float* q, void* k, void* v) {
    Timer timer(QKV);
    std::vector<float> all(M * layer->qkv.N);
    norm_multiply(all.data(), x, M, layer->norm, layer->eps, layer->qkv);
    if (layer->format == FP32) split_heads(*layer, all.data(), M, cos, sin, rope_stride, q, (float*)k, (float*)v);
    else split_heads(*layer, all.data(), M, cos, sin, rope_stride, q, (bf16*)k, (bf16*)v);
}

// x (M,C) += o(attention), then x += down(silu(gate) · up) of the normed x; gate and up are halves of one matrix (2·I,C)
void after_cache(const Layer* layer, float* x, int64_t M, float* q, const Pages* pages) {
    int64_t I = layer->down.K, H = layer->H, D = layer->D;
    std::vector<float> y(M * H * D), both(M * 2 * I), hidden(M * I);
    {
        Timer timer(ATTENTION);
        attention(y.data(), q, M, H, layer->Hk, D, *pages);
    }
    {
        Timer timer(O);
        multiply(x, y.data(), M, layer->o, true);
    }
    Timer timer(MLP);
    norm_multiply(both.data(), x, M, layer->mlp_norm, layer->eps, layer->gate_up);
    for (int64_t m = 0; m < M; m++) {
        const float *gate = &both[m * 2 * I], *up = gate + I;
        int64_t i = 0;
        for (; i + 16 <= I; i += 16) {
            f32x16 g = load16(gate + i);
            store16(&hidden[m * I + i], g / (1 + exp16(-g)) * load16(up + i));
        }
        for (; i < I; i++) hidden[m * I + i] = gate[i] / (1 + expf(-gate[i])) * up[i];
    }
    multiply(x, hidden.data(), M, layer->down, true);
}

// One token per row through a whole layer, over a cache that has made room for it: its key and value go to the last place.
static void layer_step(const Layer* layer, float* x, int64_t M, const float* cos, const float* sin, int64_t rope_stride,
                       const Pages* p) {
    int64_t Hk = layer->Hk, D = layer->D, size = layer->format == FP32 ? 4 : 2;
    std::vector<float> q(M * layer->H * D), k(M * Hk * D), v(M * Hk * D);  // room for either format
    before_cache(layer, x, M, cos, sin, rope_stride, q.data(), k.data(), v.data());
    for (int64_t b = 0; b < M; b++)
        for (int64_t head = 0; head < Hk; head++) {
            int64_t to = place(*p, b, head, p->lengths[b] - 1, D) * size, from = (b * Hk + head) * D * size;
            memcpy((char*)p->keys + to, (char*)k.data() + from, D * size);
            memcpy((char*)p->values + to, (char*)v.data() + from, D * size);
        }
    after_cache(layer, x, M, q.data(), p);
}

// The same through L layers in one call.
void steps(const Layer* const* layers, int64_t L, float* x, int64_t M, const float* cos, const float* sin,
           int64_t rope_stride, const Pages* const* pages) {
    for (int64_t i = 0; i < L; i++) layer_step(layers[i], x, M, cos, sin, rope_stride, pages[i]);
}

}  // extern "C"
