// Prefill in C++: the operations between the large products (torch's or those of products.h). With
// many rows the limit is arithmetic, not bytes.
//
// torch's matrix products run at the speed of the machine, but the operations between them do
// not: norms, rotation and gating go through memory several times, and torch's attention reaches
// a quarter of the speed of the products. Here each operation reads its input once and writes its
// output once.
//
//     M = B·T rows · H query heads · Hk KV heads · D head dim · S keys

#include "tiles.h"

template <class T>
static void norm_all(T* y, const float* x, int64_t M, int64_t C, const float* weight, float eps) {
#pragma omp parallel for if (4 * M * C >= WORTH)
    for (int64_t m = 0; m < M; m++) rms_norm(y + m * C, x + m * C, weight, C, eps);
}

// qkv (B,T,(H+2·Hk),D) → q (B,H,T,D), k and v (B,Hk,T,D). q and k are normed and rotated, v is
// copied.
template <class In, class T>
static void split_all(const In* qkv, int64_t B, int64_t tokens, int64_t H, int64_t Hk, int64_t D, const float* q_norm,
                      const float* k_norm, float eps, const float* cos, const float* sin, int64_t batch_stride, T* q, T* k,
                      T* v) {
#pragma omp parallel if (2 * B * tokens * H * D >= WORTH)
    {
        std::vector<float> head(D);
#pragma omp for
        for (int64_t m = 0; m < B * tokens; m++) {
            int64_t b = m / tokens, t = m % tokens, heads = H + 2 * Hk;
            const float *c = cos + b * batch_stride + t * D, *s = sin + b * batch_stride + t * D;
            for (int64_t h = 0; h < heads; h++) {
                const In* from = qkv + (m * heads + h) * D;
                if (h >= H + Hk) {
                    T* to = v + ((b * Hk + h - H - Hk) * tokens + t) * D;
                    for (int64_t i = 0; i < D; i++) store(to + i, to_float(from[i]));
                    continue;
                }
                place_head(head.data(), from, h < H ? q_norm : k_norm, c, s, D, eps);
                T* to = h < H ? q + ((b * H + h) * tokens + t) * D : k + ((b * Hk + h - H) * tokens + t) * D;
                for (int64_t i = 0; i < D; i++) store(to + i, head[i]);
            }
        }
    }
}

template <class T>
static void gate_all(T* y, const T* both, int64_t M, int64_t I) {
#pragma omp parallel for if (8 * M * I >= WORTH)
    for (int64_t m = 0; m < M; m++) {
        const T *gate = both + m * 2 * I, *up = gate + I;
        int64_t i = 0;
        for (; i + 16 <= I; i += 16) {
            f32x16 g = load16(gate + i), value = g / (1 + exp16(-g)) * load16(up + i);
            store16(y + m * I + i, value);
        }
        for (; i < I; i++) store(y + m * I + i, to_float(gate[i]) / (1 + expf(-to_float(gate[i]))) * to_float(up[i]));
    }
}

template <class T>
static void add_all(float* x, const T* y, int64_t count) {
    const int64_t part = 1 << 14;
#pragma omp parallel for if (4 * count >= WORTH)
    for (int64_t from = 0; from < count; from += part)
        for (int64_t i = from; i < from + part && i < count; i++) x[i] += to_float(y[i]);
}

// --- causal attention, block by block (FlashAttention), for processors that multiply bf16 --------

#if defined(__AVX512BF16__)

const int BLOCK = 64;  // queries per block, and keys: 64 × D of each fit into the first-level cache

// The values of one head in the order of the products: pairs of adjacent keys.
static void pack_values(const bf16* v, int64_t n, int64_t D, bf16* to) {
    for (int64_t s = 0; s < BLOCK; s += 2) {
        const bf16 *even = v + s * D, *odd = even + D;
        for (int64_t d = 0; d < D; d++) {
            to[(s * D / 2 + d) * 2] = s < n ? even[d] : bf16{0};
            to[(s * D / 2 + d) * 2 + 1] = s + 1 < n ? odd[d] : bf16{0};
        }
    }
}

static inline __m512bh pair(const bf16* p) {
    int32_t two;
    memcpy(&two, p, 4);
    return (__m512bh)_mm512_set1_epi32(two);
}

// The two products of attention for four queries at a time, with vector instructions.
struct Vectors {
    static const int QUERIES = 4;

    // scores (4,64) = q (4,D) · keys
    static void score(const bf16* q, const bf16* keys, int64_t D, f32x16 (*scores)[4]) {
        __m512 sum[4][4] = {};
        for (int64_t d = 0; d < D / 2; d++) {
            __m512bh k[4];
            for (int i = 0; i < 4; i++) k[i] = (__m512bh)_mm512_loadu_si512(keys + (i * D / 2 + d) * 32);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                __m512bh two = pair(q + r * D + 2 * d);
                for (int i = 0; i < 4; i++) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], two, k[i]);
            }
        }
        for (int r = 0; r < 4; r++) for (int i = 0; i < 4; i++) scores[r][i] = (f32x16)sum[r][i];
    }

    // out (4,D) = out · keep + p (4,64) · values
    static void mix(const bf16* p, const bf16* values, int64_t D, const float* keep, float* out) {
        int64_t d = 0;
        for (; d + 64 <= D; d += 64) mix_dims<4>(p, values + 2 * d, D, keep, out + d);
        for (; d < D; d += 16) mix_dims<1>(p, values + 2 * d, D, keep, out + d);
    }
    template <int N>
    static inline void mix_dims(const bf16* p, const bf16* values, int64_t D, const float* keep, float* out) {
        __m512 sum[4][N];
        for (int r = 0; r < 4; r++)
            for (int i = 0; i < N; i++) sum[r][i] = (__m512)(load16(out + r * D + 16 * i) * keep[r]);
        for (int64_t s = 0; s < BLOCK / 2; s++) {
            __m512bh v[N];
            for (int i = 0; i < N; i++) v[i] = (__m512bh)_mm512_loadu_si512(values + (s * D + 16 * i) * 2);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                __m512bh two = pair(p + r * BLOCK + 2 * s);
                for (int i = 0; i < N; i++) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], two, v[i]);
            }
        }
        for (int r = 0; r < 4; r++)
            for (int i = 0; i < N; i++) *(f32x16*)(out + r * D + 16 * i) = (f32x16)sum[r][i];
    }
};

#if defined(TILES)
// The same for sixteen queries at a time, with tiles. D is a multiple of 32. Keys and values are
// stored in pairs, as the tiles require.
struct Matrices {
    static const int QUERIES = 16;

    static void score(const bf16* q, const bf16* keys, int64_t D, f32x16 (*scores)[4]) {
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
        for (int64_t d = 0; d < D; d += 32) {
            const bf16* k = keys + 16 * d;  // the first 16 keys; the next 16 are 16 · D values on
            tile_load(4, q + d, 2 * D);
            tile_load(5, k, 64);
            tile_dot_bf16(0, 4, 5);
            tile_load(6, k + 16 * D, 64);
            tile_dot_bf16(1, 4, 6);
            tile_load(7, k + 32 * D, 64);
            tile_dot_bf16(2, 4, 7);
            tile_load(5, k + 48 * D, 64);
            tile_dot_bf16(3, 4, 5);
        }
        tile_store(0, &scores[0][0], 4 * 64);
        tile_store(1, &scores[0][1], 4 * 64);
        tile_store(2, &scores[0][2], 4 * 64);
        tile_store(3, &scores[0][3], 4 * 64);
    }

    static void mix(const bf16* p, const bf16* values, int64_t D, const float* keep, float* out) {
        for (int r = 0; r < 16; r++)
            for (int64_t d = 0; d < D && keep[r] != 1; d += 16) *(f32x16*)(out + r * D + d) *= keep[r];
        tile_load(4, p, 2 * BLOCK);  // keys 0 … 31
        tile_load(5, p + 32, 2 * BLOCK);
        for (int64_t d = 0; d < D; d += 32) {
            const bf16 *first = values + 2 * d, *second = first + 32 * D;
            tile_load(0, out + d, 4 * D);
            tile_load(1, out + d + 16, 4 * D);
            tile_load(6, first, 4 * D);
            tile_dot_bf16(0, 4, 6);
            tile_load(7, first + 32, 4 * D);
            tile_dot_bf16(1, 4, 7);
            tile_load(6, second, 4 * D);
            tile_dot_bf16(0, 5, 6);
            tile_load(7, second + 32, 4 * D);
            tile_dot_bf16(1, 5, 7);
            tile_store(0, out + d, 4 * D);
            tile_store(1, out + d + 16, 4 * D);
        }
    }
};
#endif

// The running softmax of one query over the keys so far: the largest score and the sum of
// exponentials.
struct Running {
    float most = -INFINITY, total = 0;

    // scores (64) → weights p (64), 0 for keys from `seen` on. Returns the factor for the earlier
    // sums.
    float add(f32x16* scores, int64_t seen, float scale, bf16* p) {
        float* row = (float*)scores;
        for (int64_t s = seen < 0 ? 0 : seen; s < BLOCK; s++) row[s] = -1e30f;  // not yet visible
        f32x16 high = scores[0], sum = {};
        for (int j = 1; j < 4; j++) high = scores[j] > high ? scores[j] : high;
        float largest = fmaxf(most, _mm512_reduce_max_ps((__m512)high) * scale);
        float keep = most == -INFINITY ? 0 : expf(most - largest);
        for (int j = 0; j < 4; j++) {
            f32x16 e = exp16(scores[j] * scale - largest);
            store16(p + 16 * j, e);
            sum += e;
        }
        total = total * keep + sum16(sum), most = largest;
        return keep;
    }
};

// One block of 64 queries of one head over all keys that they see. first: position of query 0 among
// the keys.
template <class Products>
static void attend_block(const bf16* q, int64_t n, int64_t first, const bf16* keys, const bf16* values, int64_t D, bf16* y,
                         int64_t y_stride) {
    const int QUERIES = Products::QUERIES;
    std::vector<float> out(BLOCK * D);
    std::vector<bf16> padded(BLOCK * D);
    Running running[BLOCK];
    float scale = 1 / sqrtf((float)D);
    memcpy(padded.data(), q, n * D * sizeof(bf16));
    for (int64_t from = 0; from < first + n; from += BLOCK, keys += BLOCK * D, values += BLOCK * D)
        for (int64_t r = 0; r < n; r += QUERIES) {
            f32x16 scores[QUERIES][4];
            alignas(64) bf16 p[QUERIES * BLOCK];
            float keep[QUERIES];
            if (from >= first + r + QUERIES) continue;  // these queries see none of these keys
            Products::score(&padded[r * D], keys, D, scores);
            for (int i = 0; i < QUERIES; i++)
                keep[i] = running[r + i].add(scores[i], first + r + i + 1 - from, scale, p + i * BLOCK);
            Products::mix(p, values, D, keep, &out[r * D]);
        }
    for (int64_t r = 0; r < n; r++)
        for (int64_t d = 0; d < D; d++) store(y + r * y_stride + d, out[r * D + d] / running[r].total);
}

#endif

// --- functions called from Python ----------------------------------------------------------------

extern "C" {

// x (M,C) fp32 → y (M,C) in `format` (0 fp32, 1 bf16)
void norm_rows(void* y, const float* x, int64_t M, int64_t C, const float* weight, float eps, int32_t format) {
    Timer timer(BETWEEN);
    format == FP32 ? norm_all((float*)y, x, M, C, weight, eps) : norm_all((bf16*)y, x, M, C, weight, eps);
}

// form: of qkv. format: of q, k and v. Both are the same, or form is fp32 and format bf16.
void split_rows(const void* qkv, int64_t B, int64_t T, int64_t H, int64_t Hk, int64_t D, const float* q_norm,
                const float* k_norm, float eps, const float* cos, const float* sin, int64_t batch_stride, void* q, void* k,
                void* v, int32_t form, int32_t format) {
    Timer timer(BETWEEN);
    auto split = [&](auto* from, auto* to) {
        typedef decltype(to) Out;
        split_all(from, B, T, H, Hk, D, q_norm, k_norm, eps, cos, sin, batch_stride, to, (Out)k, (Out)v);
    };
    if (format == FP32) split((const float*)qkv, (float*)q);
    else if (form == FP32) split((const float*)qkv, (bf16*)q);
    else split((const bf16*)qkv, (bf16*)q);
}

// both (M,2·I) → y (M,I) = silu(gate) · up
void gate_rows(void* y, const void* both, int64_t M, int64_t I, int32_t format) {
    Timer timer(BETWEEN);
    format == FP32 ? gate_all((float*)y, (const float*)both, M, I) : gate_all((bf16*)y, (const bf16*)both, M, I);
}

// x += y
void add_rows(float* x, const void* y, int64_t count, int32_t format) {
    Timer timer(BETWEEN);
    format == FP32 ? add_all(x, (const float*)y, count) : add_all(x, (const bf16*)y, count);
}

// Whether flash_attention supports this head dim.
int32_t has_flash(int64_t D) {
#if defined(__AVX512BF16__)
    return D % 16 == 0;
#else
    return 0;
#endif
}

// Causal attention in bf16: q (B,H,T,D), k and v (B,Hk,S,D) → y (B,T,H,D). The strides are those of
// batch and head in k and v, whose tokens are D values apart. The T queries are the last of the S
// positions.
void flash_attention(void* y, const void* q, const void* k, const void* v, int64_t B, int64_t H, int64_t Hk, int64_t T,
                     int64_t S, int64_t D, int64_t batch_stride, int64_t head_stride) {
    Timer timer(ATTENTION);
#if defined(__AVX512BF16__)
    int64_t blocks = (S + BLOCK - 1) / BLOCK, queries = (T + BLOCK - 1) / BLOCK, G = H / Hk;
    std::vector<Line> lines(2 * B * Hk * blocks * BLOCK * D / 32);
    bf16 *keys = lines[0].values, *values = lines[lines.size() / 2].values;
    auto attend = attend_block<Vectors>;
#if defined(TILES)
    if (D % 32 == 0 && tiles_allowed()) attend = attend_block<Matrices>;
#endif
#pragma omp parallel if (B * H * T * S >= WORTH)
    {
        Tiles configured;
#pragma omp for collapse(2)
        for (int64_t row = 0; row < B * Hk; row++)
            for (int64_t block = 0; block < blocks; block++) {
                int64_t from = row / Hk * batch_stride + row % Hk * head_stride + block * BLOCK * D;
                int64_t to = (row * blocks + block) * BLOCK * D, n = S - block * BLOCK < BLOCK ? S - block * BLOCK : BLOCK;
                for (int64_t s = 0; s < BLOCK; s += 16)
                    pack_pairs((const bf16*)k + from + s * D, n - s, D, (uint32_t*)&keys[to + s * D]);
                pack_values((const bf16*)v + from, n, D, &values[to]);
            }
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t i = 0; i < queries; i++)
            for (int64_t head = 0; head < B * H; head++) {
                // The longest rows first.
                int64_t block = queries - 1 - i, b = head / H, h = head % H, first = block * BLOCK;
                int64_t n = T - first < BLOCK ? T - first : BLOCK, at = (b * Hk + h / G) * blocks * BLOCK * D;
                attend((const bf16*)q + (head * T + first) * D, n, S - T + first, &keys[at], &values[at], D,
                       (bf16*)y + ((b * T + first) * H + h) * D, H * D);
            }
    }
#endif
}

}  // extern "C"
