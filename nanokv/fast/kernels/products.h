// y = x · wᵀ for few rows of activations. Weights are read once, in their stored format.
//
//     M rows of activations · N outputs · K inputs

#pragma once
#include "panels.h"

// --- inner products: R rows of weights with one row of activations -------------------------------

// Four sums, so that no addition waits for the previous one.
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

// R rows of weights with C rows of activations, K values apart: y[r][c] = w_r · x_c. Each load is
// used for C or R products, and 3 · 4 sums fit into sixteen registers.
template <int R, int C, class T>
static inline void dots(const T* w, const float* x, int64_t K, float (*y)[C]) {
    floats sum[R][C] = {};
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
        floats wk[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) load(wk[r], w + r * K + k);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            floats xk = *(const floats*)(x + c * K + k);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sum[r][c] += wk[r] * xk;
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            y[r][c] = sum16(sum[r][c]);
            for (int64_t i = k; i < K; i++) y[r][c] += to_float(w[r * K + i]) * x[c * K + i];
        }
}

// The number of pairs of groups, in which int4 packs a row.
static inline int64_t pairs_of(int64_t K) { return (K + 2 * GROUP - 1) / (2 * GROUP); }

// Activations in 8 bits with a scale per group: x ≈ codes · scale. Padded with zeros to whole
// blocks.
const int64_t BLOCK_OF_CODES = 512;

#if defined(WIDE_PRODUCTS)
// Activations as a unit of blocks reads them: codes in its order, and the number by which each lane
// of its `all` is multiplied.
template <class B>
struct alignas(64) Activations {
    static const int STEPS = B::UNIT / 64;
    int8_t code[STEPS][64];
    float factor[16];
    int32_t start[B::ZERO ? STEPS / B::SHARED : 1][16];  // −ZERO · sum of the codes of each lane
};
#endif

struct Codes {
    // split: the codes in the order of int4 weights: of 128 codes groups 0 and 2, then 1 and 3.
    std::vector<int8_t> code, split;
    // offset = scale · (sum of the group's codes): the correction for a zero point of 1.
    std::vector<float> scale, offset;
    std::vector<float> wide;  // each scale 8 times, one lane per sum of 4 products
    float total;              // sum of the offsets
    std::unique_ptr<Line[]> units;  // for blocks, where there are products of 64 codes
    void quantize(const float* x, int64_t K, int32_t format) {
        int64_t padded = (K + BLOCK_OF_CODES - 1) / BLOCK_OF_CODES * BLOCK_OF_CODES;
        code.assign(padded, 0), scale.assign(padded / GROUP, 0), offset.assign(padded / GROUP, 0), total = 0;
        for (int64_t g = 0; g < K / GROUP; g++) {
            f32x16 a = load16(x + g * GROUP), b = load16(x + g * GROUP + 16);
            float largest = max16(max16(abs16(a), abs16(b)));
            bool finite = finite16(a) && finite16(b);
            float inverse = finite && largest > 1e-30f ? 127 / largest : 0;
            int sum = inverse ? round16(a * inverse, &code[g * GROUP]) + round16(b * inverse, &code[g * GROUP + 16]) : 0;
            scale[g] = finite ? largest / 127 : NAN;  // codes cannot hold NaN or infinity
            offset[g] = scale[g] * sum, total += offset[g];
        }
        if (format == INT8) {
            wide.resize(padded / 4);
            for (int64_t i = 0; i < padded / 4; i++) wide[i] = scale[i / 8];
        } else if (format == INT4) {
            split.resize(padded);
            for (int64_t g = 0; g < padded / GROUP; g++)
                memcpy(&split[g / 4 * 128 + g % 2 * 64 + g % 4 / 2 * GROUP], &code[g * GROUP], GROUP);
        }
#if defined(WIDE_PRODUCTS)
        if (format >= Q4_0) with_blocks(format, [&](auto type) { make_units<decltype(type)>(padded / decltype(type)::UNIT); });
#endif
    }
#if defined(WIDE_PRODUCTS)
    template <class B>
    void make_units(int64_t count) {
        units.reset(new Line[count * sizeof(Activations<B>) / sizeof(Line)]);
        for (int64_t u = 0; u < count; u++) {
            Activations<B>& unit = ((Activations<B>*)units.get())[u];
            for (int c = 0; c < B::UNIT / 16; c++) memcpy(unit.code[0] + 16 * c, &code[u * B::UNIT + 16 * B::chunk(c)], 16);
            memset(unit.factor, 0, sizeof(unit.factor));
            for (int g = 0; g < B::UNIT / GROUP; g++) {
                int64_t at = u * B::UNIT / GROUP + g;
                for (int half = 0; half < B::SCALES; half++) unit.factor[B::scale_at(g, half)] = scale[at];
                if (B::LEAST) unit.factor[B::least_at(g)] = B::LEAST * offset[at];
            }
            for (int i = 0; i < Activations<B>::STEPS && B::ZERO; i += B::SHARED) {
                __m512i sums = _mm512_setzero_si512();
                for (int j = i; j < i + B::SHARED; j++)
                    sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), _mm512_load_si512(unit.code[j]));
                _mm512_store_si512(unit.start[i / B::SHARED], _mm512_mullo_epi32(sums, _mm512_set1_epi32(-B::ZERO)));
            }
        }
    }
#endif
};

// Products of unsigned weights and signed activations are summed exactly in int32, four at a
// time, and then multiplied by the scales. int8: one byte per weight and one scale per row. int4:
// 32 bytes hold two groups, one in the low and one in the high halves, stored as code + 8, and a
// bf16 scale per group.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
static inline __m512 add_products(__m512 sum, __m512i w, const int8_t* x, __m512 scale) {
    __m512i products = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, _mm512_loadu_si512(x));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), scale, sum);
}
// 64 bytes, of which those from `count` on are zeros and not read.
static inline __m512i bytes64(const uint8_t* p, int64_t count) {
    if (count >= 64) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi8(((__mmask64)1 << count) - 1, p);
}
static inline float dot_int8(const uint8_t* w, float scale, const Codes& x, int64_t K) {
    const __m512i flip = _mm512_set1_epi8((char)128);  // adds 128, which is subtracted at the end
    __m512 sum[4] = {};
    int64_t k = 0;
    for (; k + 256 <= K; k += 256)
        for (int i = 0; i < 4; i++) {
            int64_t at = k + 64 * i;
            __m512i plus128 = _mm512_xor_si512(_mm512_loadu_si512(w + at), flip);
            sum[i] = add_products(sum[i], plus128, &x.code[at], _mm512_loadu_ps(&x.wide[at / 4]));
        }
    for (; k < K; k += 64)
        sum[0] = add_products(sum[0], _mm512_xor_si512(bytes64(w + k, K - k), flip), &x.code[k],
                              _mm512_loadu_ps(&x.wide[k / 4]));
    return (_mm512_reduce_add_ps((sum[0] + sum[1]) + (sum[2] + sum[3])) - 128 * x.total) * scale;
}
static inline float dot_int4(const uint8_t* w, const bf16* scale, const Codes& x, int64_t K) {
    const __m512i low4 = _mm512_set1_epi8(15);
    __m512i groups = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2);
    __m512 a = _mm512_setzero_ps(), b = a, offset = a;
    int64_t bytes = pairs_of(K) * GROUP;
    for (int64_t k = 0; k < K; k += 512) {  // 16 groups, 256 bytes
        int64_t left = bytes - k / 2;
        __mmask16 some = left >= 256 ? 0xffff : (1 << left / 16) - 1;
        __m512i half = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, scale + k / GROUP));
        __m512 s = _mm512_castsi512_ps(_mm512_slli_epi32(half, 16)), both = s * _mm512_loadu_ps(&x.scale[k / GROUP]);
        offset = _mm512_fmadd_ps(s, _mm512_loadu_ps(&x.offset[k / GROUP]), offset);
        for (int i = 0; i < 4 && 64 * i < left; i++) {
            __m512i pair = bytes64(w + k / 2 + 64 * i, left - 64 * i);
            __m512i at = _mm512_add_epi32(groups, _mm512_set1_epi32(4 * i));
            __m512i after = _mm512_add_epi32(at, _mm512_set1_epi32(1));
            __m512i high = _mm512_and_si512(_mm512_srli_epi16(pair, 4), low4);
            const int8_t* codes = &x.split[k + 128 * i];
            a = add_products(a, _mm512_and_si512(pair, low4), codes, _mm512_permutexvar_ps(at, both));
            b = add_products(b, high, codes + 64, _mm512_permutexvar_ps(after, both));
        }
    }
    return _mm512_reduce_add_ps(a + b - 8 * offset);
}
#else
#if defined(__AVX2__)
// The products of one group. Two products of bytes are summed in 16 bits, then two of these sums
// in 32. With unsigned weights (int4, `mask` is set) a sum is at most 2 · 15 · 127. Signed
// weights are made unsigned by moving their sign to the activations: 2 · 128 · 127 fits into 16
// bits as well.
typedef __m256 f32x8;
static inline f32x8 zero8() { return _mm256_setzero_ps(); }
static inline void add_products(f32x8& sum, const uint8_t* w, int shift, int mask, const int8_t* x, float scale) {
    __m256i codes = _mm256_loadu_si256((const __m256i*)x), weights = _mm256_loadu_si256((const __m256i*)w);
    if (mask) weights = _mm256_and_si256(_mm256_srli_epi16(weights, shift), _mm256_set1_epi8(mask));
    else codes = _mm256_sign_epi8(codes, weights), weights = _mm256_abs_epi8(weights);
    __m256i pairs = _mm256_maddubs_epi16(weights, codes);
    __m256i products = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    sum += _mm256_cvtepi32_ps(products) * _mm256_set1_ps(scale);
}
static inline float sum8(f32x8 a, f32x8 b) {
    __m256 sum = a + b;
    __m128 four = _mm256_castps256_ps128(sum) + _mm256_extractf128_ps(sum, 1);
    return (four[0] + four[1]) + (four[2] + four[3]);
}
#else
typedef float f32x8;
static inline f32x8 zero8() { return 0; }
static inline void add_products(f32x8& sum, const uint8_t* w, int shift, int mask, const int8_t* x, float scale) {
    int products = 0;
    for (int i = 0; i < GROUP; i++) products += (mask ? w[i] >> shift & mask : (int8_t)w[i]) * x[i];
    sum += products * scale;
}
static inline float sum8(f32x8 a, f32x8 b) { return a + b; }
#endif
static inline float dot_int8(const uint8_t* w, float scale, const Codes& x, int64_t K) {
    f32x8 a = zero8(), b = zero8();
    int64_t g = 0;
    for (; g + 2 <= K / GROUP; g += 2) {
        add_products(a, w + g * GROUP, 0, 0, &x.code[g * GROUP], x.scale[g]);
        add_products(b, w + (g + 1) * GROUP, 0, 0, &x.code[(g + 1) * GROUP], x.scale[g + 1]);
    }
    if (g < K / GROUP) add_products(a, w + g * GROUP, 0, 0, &x.code[g * GROUP], x.scale[g]);
    return sum8(a, b) * scale;
}
static inline float dot_int4(const uint8_t* w, const bf16* scale, const Codes& x, int64_t K) {
    f32x8 a = zero8(), b = zero8();
    float offset = 0;
    for (int64_t g = 0; g < 2 * pairs_of(K); g += 2, w += GROUP) {
        float s = to_float(scale[g]), t = to_float(scale[g + 1]);
        add_products(a, w, 0, 15, &x.code[g * GROUP], s * x.scale[g]);
        add_products(b, w, 4, 15, &x.code[(g + 1) * GROUP], t * x.scale[g + 1]);
        offset += s * x.offset[g] + t * x.offset[g + 1];
    }
    return sum8(a, b) - 8 * offset;
}
#endif

#if defined(WIDE_PRODUCTS)
// A unit of a row of blocks with C rows of activations. Each lane of a scale and of a least value
// is multiplied with its activation's number once, for all codes.
template <class B, int C>
static inline void add_unit(const typename B::Unit& w, const Activations<B>* const* x, int64_t u, __m512* sum, __m512* least) {
    __m512 factor[C];
    __m512i products[C];
    for (int c = 0; c < C; c++) {
        factor[c] = w.all * _mm512_load_ps(x[c][u].factor);
        if (B::LEAST) least[c] += factor[c];
    }
#pragma GCC unroll 4
    for (int i = 0; i < Activations<B>::STEPS; i++) {
        __m512i codes = w.codes(i);
        for (int c = 0; c < C; c++) {
            const Activations<B>& unit = x[c][u];
            if (i % B::SHARED == 0)
                products[c] = B::ZERO ? _mm512_load_si512(unit.start[i / B::SHARED]) : _mm512_setzero_si512();
            products[c] = _mm512_dpbusd_epi32(products[c], codes, _mm512_load_si512(unit.code[i]));
            if (i % B::SHARED == B::SHARED - 1)
                sum[c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[c]), B::Unit::spread(factor[c], i), sum[c]);
        }
    }
}
// Rows of blocks between a load and its prefetch. The processor itself does not notice that
// several rows are read at once.
const int FETCHED = 16;

// R rows of blocks with C rows of activations: y[r][c]. Codes are decoded once for C products.
template <class B, int R, int C>
static inline void dots_blocks(const uint8_t* row, const Codes* codes, int64_t K, float (*y)[C]) {
    __m512 sum[R][C] = {}, least[R][C] = {};
    const Activations<B>* x[C];
    for (int c = 0; c < C; c++) x[c] = (const Activations<B>*)codes[c].units.get();
    const int blocks = B::UNIT / B::SIZE;
    int64_t count = K / B::SIZE, bytes = count * B::BYTES, u = 0;
    auto add = [&](int64_t left) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const uint8_t* unit = row + r * bytes + u * blocks * B::BYTES;
            if (R > 1)
                for (int i = 0; i < blocks * B::BYTES; i += 64) __builtin_prefetch(unit + FETCHED * bytes + i, 0, 2);
            add_unit<B, C>({unit, left}, x, u, sum[r], least[r]);
        }
    };
    for (; (u + 1) * blocks <= count; u++) add(blocks);
    if (u * blocks < count) add(count - u * blocks);
    __mmask16 lanes = 0;
    for (int g = 0; g < B::UNIT / GROUP; g++) lanes |= 1 << B::least_at(g);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            y[r][c] = _mm512_reduce_add_ps(B::LEAST ? _mm512_mask_add_ps(sum[r][c], lanes, sum[r][c], least[r][c]) : sum[r][c]);
}
#else
static inline void add_group(f32x8& sum, const Group& w, const int8_t* x, float scale) {
#if defined(__AVX2__)
    __m256i codes = _mm256_loadu_si256((const __m256i*)x), weights = _mm256_set_m128i((__m128i)w.code[1], (__m128i)w.code[0]);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(codes, weights));
    __m256i products = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    __m256 both = _mm256_set_m128(_mm_set1_ps(w.scale[1]), _mm_set1_ps(w.scale[0]));
    sum += _mm256_cvtepi32_ps(products) * (both * scale);
#else
    int products[2] = {};
    for (int i = 0; i < GROUP; i++) products[i / 16] += (int8_t)w.code[i / 16][i % 16] * x[i];
    sum += (products[0] * w.scale[0] + products[1] * w.scale[1]) * scale;
#endif
}
template <class B, int R, int C>
static inline void dots_blocks(const uint8_t* row, const Codes* x, int64_t K, float (*y)[C]) {
    for (int r = 0; r < R; r++, row += K / B::SIZE * B::BYTES) {
        f32x8 sum[C];
        float least[C] = {};
        for (int c = 0; c < C; c++) sum[c] = zero8();
        for (int64_t g = 0; g < K / GROUP; g++) {
            Group w = B::group(row, g);
            for (int c = 0; c < C; c++) {
                add_group(sum[c], w, &x[c].code[g * GROUP], x[c].scale[g]);
                if (B::LEAST) least[c] += w.least * x[c].offset[g];
            }
        }
        for (int c = 0; c < C; c++) y[r][c] = sum8(sum[c], zero8()) + least[c];
    }
}
#endif

// A row of codes as bf16 (or fp32), rounded once: w = code · scale, with the scale in the same
// format.
template <class T>
static inline void unpack_int8(T* to, const uint8_t* w, float scale, int64_t K) {
    T rounded;
    store(&rounded, scale);
    float s = to_float(rounded);
    int64_t k = 0;
    for (; k + 16 <= K; k += 16) store16(to + k, load16((const int8_t*)w + k) * s);
    for (; k < K; k++) store(to + k, (int8_t)w[k] * s);
}
template <class T>
static inline void unpack_int4(T* to, const uint8_t* w, const bf16* scale, int64_t K) {
    for (int64_t g = 0; g * GROUP < K; g++)
        for (int i = 0; i < GROUP; i += 16) {
            u8x16 pair = *(const u8x16*)(w + g / 2 * GROUP + i), code = g % 2 ? pair >> 4 : pair & 15;
            store16(to + g * GROUP + i, (load16((const int8_t*)&code) - 8) * to_float(scale[g]));
        }
}

// --- linear: y (M,N) = x (M,K) · wᵀ, or y += x · wᵀ ----------------------------------------------

// A matrix, or its first rows: then the other rows follow in `next`, in a format of their own.
struct Weight {  // filled by nanokv/fast/native.py
    const void* data;
    const void* scale;  // INT8: float (N); INT4: bf16 (N,K/32); else null
    const float* bias;  // (N) or null
    int64_t N, K;
    int32_t format;
    int64_t width;  // outputs of the whole matrix: values between two rows of y
    const Weight* next;
};

static inline int64_t row_bytes(const Weight& w) {
    const int64_t bytes[] = {4 * w.K, 2 * w.K, w.K, pairs_of(w.K) * GROUP};
    return w.format < Q4_0 ? bytes[w.format] : bytes_of_blocks(w.format, w.K);
}

// Groups of a row up to the next 256 inputs, which are whole units of every type of blocks.
static inline int64_t groups_of_units(int64_t K) { return (K + 255) / 256 * 8; }

// TILE: rows of a tile, of weights and of activations. AHEAD: how many rows of weights are
// prefetched.
const int TILE = 4, AHEAD = 8 * TILE;
const int PASS = 8;  // rows of weights per pass if the lanes of a vector are rows of activations

#if defined(__AVX512BF16__)
// One row of bf16 weights with one row of bf16 activations: 64 FLOPs per instruction. The four
// sums are separate variables, so that the compiler keeps them in registers. An array indexed by
// k / 32 % 4 would be in memory, and a matrix in the second-level cache would take twice the
// time.
static inline float dot_bf16(const bf16* w, const bf16* x, int64_t K) {
    __m512 a = _mm512_setzero_ps(), b = a, c = a, d = a;
    auto add = [&](__m512 sum, int64_t k) {
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(w + k), (__m512bh)_mm512_loadu_si512(x + k));
    };
    int64_t k = 0;
    for (; k + 128 <= K; k += 128) a = add(a, k), b = add(b, k + 32), c = add(c, k + 64), d = add(d, k + 96);
    if (k < K) a = add(a, k);
    if (k + 32 < K) b = add(b, k + 32);
    if (k + 64 < K) c = add(c, k + 64);
    return _mm512_reduce_add_ps((a + b) + (c + d));
}

// y[4·c + r] = w_r · x_c for four rows of weights and four of activations: 64 FLOPs per
// instruction, one load per two instructions. With several rows of activations arithmetic takes
// as much time as memory, and the processor would alternate between the two. Therefore each step
// prefetches LINES cache lines of later rows.
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

// The same sums for four rows of weights and a single one of activations.
template <int LINES>
static inline void column_bf16(const bf16* w, int64_t rows, const bf16* x, int64_t K, const bf16* ahead, int64_t apart,
                               float* y) {
    const bf16* row[TILE];
    for (int r = 0; r < TILE; r++) row[r] = w + (r < rows ? r : 0) * K;
    __m512 sum[TILE] = {};
    for (int64_t k = 0; k < K; k += 32) {
        for (int i = 0; i < LINES; i++) __builtin_prefetch(ahead + i * apart + k, 0, 2);
        __m512bh xk = (__m512bh)_mm512_loadu_si512(x + k);
#pragma GCC unroll 4
        for (int r = 0; r < TILE; r++) sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)_mm512_loadu_si512(row[r] + k), xk);
    }
    _mm_storeu_ps(y, sums4(sum));
}

// For more than two tiles of activations, each lane of a vector is one row of activations: x
// holds pairs of inputs of 16 rows side by side, and a pair of weights is broadcast to all lanes.
// No sum crosses lanes, and activations, which no longer fit into the first-level cache, are
// loaded once per eight rows of weights instead of four. sums[block][r] = w_r · x of that block.
template <int BLOCKS>
static inline void lanes_bf16(const bf16* w, const Line* x, int64_t K, const bf16* ahead, float (*sums)[2 * PASS][16]) {
    __m512 sum[PASS][BLOCKS] = {};
    for (int64_t k = 0; k < K; k += 32) {
#pragma GCC unroll 8
        for (int r = 0; r < PASS; r++) __builtin_prefetch(ahead + r * K + k, 0, 2);
        for (int64_t i = k; i < k + 32; i += 2) {
            __m512bh two[BLOCKS];
#pragma GCC unroll 2
            for (int b = 0; b < BLOCKS; b++) two[b] = (__m512bh)_mm512_load_si512(&x[(b * K + i) / 2]);
#pragma GCC unroll 8
            for (int r = 0; r < PASS; r++) {
                int32_t pair;
                memcpy(&pair, w + r * K + i, 4);
#pragma GCC unroll 2
                for (int b = 0; b < BLOCKS; b++)
                    sum[r][b] = _mm512_dpbf16_ps(sum[r][b], two[b], (__m512bh)_mm512_set1_epi32(pair));
            }
        }
    }
    for (int r = 0; r < PASS; r++)
        for (int b = 0; b < BLOCKS; b++) _mm512_storeu_ps(sums[b][r], sum[r][b]);
}
#endif

static inline void put(float* y, const Weight& w, int64_t n, float value, bool add) {
    value += w.bias ? w.bias[n] : 0;
    y[n] = add ? y[n] + value : value;
}

static inline void put4(float* y, const Weight& w, int64_t n, const float* values, int64_t count, bool add) {
    if (count < 4) {
        for (int64_t r = 0; r < count; r++) put(y, w, n + r, values[r], add);
        return;
    }
    f32x4 four = *(const f32x4*)values;
    if (w.bias) four += *(const f32x4*)(w.bias + n);
    *(f32x4*)(y + n) = add ? *(f32x4*)(y + n) + four : four;
}

static inline void put16(float* y, const Weight& w, int64_t n, f32x16 values, bool add) {
    if (w.bias) values += load16(w.bias + n);
    store16(y + n, add ? load16(y + n) + values : values);
}

// The values of outputs `at` … at+15, of which only those from `from` to `to` − 1 are stored.
static inline void put_some(float* y, const Weight& w, int64_t at, f32x16 values, int64_t from, int64_t to, bool add) {
    if (from <= at && at + 16 <= to) return put16(y, w, at, values, add);
    float each[16];
    store16(each, values);
    for (int64_t i = from > at ? from : at; i < to && i < at + 16; i++) put(y, w, i, each[i - at], add);
}

// In which order a product adds.
//
//     FASTEST   the order that is fastest for this number of rows of activations
//     FIXED     one order for any number: a row gives the same bits alone and among others
//
// In FIXED bf16 weights have tiles of 4 rows; without bf16 products, and in fp32, each row has a `dot`.
// Codes and blocks have activations of 8 bits.
enum Sums { FASTEST, FIXED };

// The most rows of activations that are multiplied with blocks as bytes. A prompt has more: bf16
// keeps its activations five times as exactly.
#if defined(__AVX512BF16__)
const int64_t MOST_IN_BYTES = 2 * TILE;
#else
const int64_t MOST_IN_BYTES = 32;
#endif

struct Input {  // x in the form required by the format of the weights, made once for all threads
    const float* x;
    int64_t M;
    int32_t format;  // of the weights
    bool many;       // whether the weights have 32 rows
    Sums sums;
    std::vector<Codes> codes;  // for int8, int4 and blocks
    // If the processor has bf16 products: rounded to bf16, as torch does between two products.
    std::vector<bf16> half;
    std::unique_ptr<Line[]> paired;  // `half` in blocks of 16 rows, for tiles or a row per lane
#if defined(WIDE_PRODUCTS)
    // For several rows with blocks: of each four rows all groups, up to whole units.
    std::unique_ptr<Quad[]> quads;
    void pack_quads(int64_t K) {
        int64_t groups = groups_of_units(K);
        quads.reset(new Quad[(M + 3) / 4 * groups]());
#pragma omp parallel for if (M * K >= MANY)
        for (int64_t first = 0; first < M; first += 4) {
            Codes row;
            for (int64_t m = 0; m < 4 && first + m < M; m++) {
                row.quantize(x + (first + m) * K, K, FP32);
                for (int64_t g = 0; g * GROUP < K; g++) {
                    Quad& quad = quads[first / 4 * groups + g];
                    memcpy(quad.code[m], &row.code[g * GROUP], GROUP);
                    quad.scale[m] = row.scale[g], quad.offset[m] = row.offset[g];
                    for (int i = 0; i < GROUP; i++) quad.sum[i / 16][m] += quad.code[m][i];
                }
            }
        }
    }
#endif
    bool serves(const Weight& w) const { return w.format == format && (w.N >= 32) == many; }
    Input(const float* x, int64_t M, const Weight& w, Sums sums)
        : x(x), M(M), format(w.format), many(w.N >= 32), sums(sums) {
        int64_t K = w.K;
        bool fastest = sums == FASTEST;
#if defined(WIDE_PRODUCTS)
        if (fastest && w.format >= Q4_0 && M > TILE && M <= MOST_IN_BYTES && many && !tiles_allowed()) {
            pack_quads(K);
            return;
        }
#endif
#if defined(__AVX512BF16__)
        if (K % 32 == 0 && (w.format == BF16 || (fastest && w.format >= INT8 && M > 2 * TILE))) {
            // Up to TILE rows memory is the limit.
            if (fastest && M > (tiles_allowed() ? TILE : 2 * TILE) && many) {
                paired.reset(new Line[(M + 15) / 16 * K / 2]);
#pragma omp parallel for if (M * K >= MANY)
                for (int64_t m = 0; m < M; m += 16) pack_pairs(x + m * K, M - m, K, (uint32_t*)&paired[m * K / 32]);
                return;
            }
            half.resize((M + TILE - 1) / TILE * TILE * K);
#pragma omp parallel for if (M * K >= MANY)
            for (int64_t m = 0; m < M; m++)
                for (int64_t k = 0; k < K; k += 16) store16(&half[m * K + k], load16(x + m * K + k));
        }
#endif
        if (w.format < INT8 || !half.empty()) return;
        codes.resize(M);
#pragma omp parallel for if (M * K >= MANY)
        for (int64_t m = 0; m < M; m++) codes[m].quantize(x + m * K, K, w.format);
    }
};

// R rows of weights, from row n on. With fp32 weights each product is a `dot`, so a row of
// activations gives the same bits alone and among other rows.
template <int R, class T>
static void block_dense(float* y, const Weight& w, const Input& in, int64_t n, bool add) {
    const T* data = (const T*)w.data + n * w.K;
    int64_t m = 0;
    for (; m + TILE <= in.M && w.format == BF16; m += TILE) {
        float sums[R][TILE];
        dots<R, TILE>(data, in.x + m * w.K, w.K, sums);
        for (int c = 0; c < TILE; c++)
            for (int r = 0; r < R; r++) put(y + (m + c) * w.width, w, n + r, sums[r][c], add);
    }
    for (; m < in.M; m++)
        for (int r = 0; r < R; r++) put(y + m * w.width, w, n + r, dot(data + r * w.K, in.x + m * w.K, w.K), add);
}

template <class T>
static void rows_dense(float* y, const Weight& w, const Input& in, int64_t n0, int64_t n1, bool add) {
    int64_t n = n0;
    for (; n + 3 <= n1; n += 3) block_dense<3, T>(y, w, in, n, add);
    for (; n < n1; n++) block_dense<1, T>(y, w, in, n, add);
}

// The products of FIXED without wide instructions. A compiler may add in another order in each place
// where it inlines a sum, so these are functions of their own.
template <class T>
__attribute__((noinline)) static float dot_fixed(const T* w, const float* x, int64_t K) {
    return dot(w, x, K);
}
template <class B>
__attribute__((noinline)) static float dot_blocks_fixed(const uint8_t* row, const Codes* x, int64_t K) {
    float y[1][1];
    dots_blocks<B, 1, 1>(row, x, K, y);
    return y[0][0];
}
template <class T>
static void rows_fixed(float* y, const Weight& w, const Input& in, int64_t n0, int64_t n1, bool add) {
    for (int64_t n = n0; n < n1; n++)
        for (int64_t m = 0; m < in.M; m++)
            put(y + m * w.width, w, n, dot_fixed((const T*)w.data + n * w.K, in.x + m * w.K, w.K), add);
}

template <class T>
static void unpack(T* to, const Weight& w, int64_t n) {  // row n of int8, int4 or blocks
    int64_t bytes = row_bytes(w);
    const uint8_t* row = (const uint8_t*)w.data + n * bytes;
    if (w.format == INT8) unpack_int8(to, row, ((const float*)w.scale)[n], w.K);
    else if (w.format == INT4) unpack_int4(to, row, (const bf16*)w.scale + n * bytes / 16, w.K);
    else with_blocks(w.format, [&](auto type) { unpack_blocks<decltype(type)>(to, row, w.K); });
}

// Row n of weights in any format → (K) fp32.
static void table_row(float* to, const Weight& w, int64_t n) {
    if (w.format >= INT8) return unpack(to, w, n);
    if (w.format == FP32) memcpy(to, (const float*)w.data + n * w.K, w.K * sizeof(float));
    for (int64_t k = 0; k < w.K && w.format == BF16; k++) to[k] = to_float(((const bf16*)w.data)[n * w.K + k]);
}

#if defined(__AVX512BF16__)
// A tile of weights stays in the first-level cache while all rows of activations are multiplied
// with it, four at a time. The prefetches of later rows are divided among these passes. In FIXED a
// last row that is alone costs a quarter, for the same sums.
static void rows_bf16(float* y, const Weight& w, const Input& in, int64_t n0, int64_t n1, bool add) {
    int64_t passes = (in.M + TILE - 1) / TILE, K = w.K;
    std::vector<bf16> unpacked(w.format == BF16 ? 0 : TILE * K);
    auto tile = w.format != BF16 ? tile_bf16<0> : passes == 1 ? tile_bf16<4> : passes < 4 ? tile_bf16<2> : tile_bf16<1>;
    auto single = passes == 1 ? column_bf16<4> : column_bf16<1>;
    for (int64_t n = n0; n < n1; n += TILE) {
        const bf16* data = w.format == BF16 ? (const bf16*)w.data + n * K : unpacked.data();
        for (int64_t r = 0; r < TILE && n + r < n1 && w.format != BF16; r++) unpack(&unpacked[r * K], w, n + r);
        for (int64_t pass = 0; pass < passes; pass++) {
            float sums[TILE * TILE];
            const bf16* ahead = data + (AHEAD + pass % TILE) * K;
            auto product = in.sums == FIXED && pass * TILE + 1 == in.M ? single : tile;
            product(data, n1 - n, &in.half[pass * TILE * K], K, ahead, passes == 1 ? K : passes * K, sums);
            for (int64_t m = pass * TILE; m < in.M && m < (pass + 1) * TILE; m++)
                put4(y + m * w.width, w, n, &sums[m % TILE * TILE], n1 - n, add);
        }
    }
}

// sums[r][m] of 16 rows of weights and 16 of activations → y[m][n … n+15], for columns `from` …
// `to` − 1 and the first `rows` rows of activations.
static void put_block(float* y, const Weight& w, int64_t n, const float (*sums)[16], int64_t rows, int64_t from, int64_t to,
                      bool add) {
    __m512 turned[16];
    for (int i = 0; i < 16; i++) turned[i] = _mm512_loadu_ps(sums[i]);
    turn16(turned);
    for (int64_t m = 0; m < rows; m++) put_some(y + m * w.width, w, n, (f32x16)turned[m], from, to, add);
}

// Sixteen rows of weights at a time, over all rows of activations. Codes are first converted to
// bf16. The last block of a matrix is a whole block that begins earlier; results that it computes
// again are not stored again.
static void rows_lanes(float* y, const Weight& w, const Input& in, int64_t n0, int64_t n1, bool add) {
    int64_t K = w.K;
    // Not a vector, which would be zeroed.
    std::unique_ptr<bf16[]> unpacked(w.format == BF16 ? nullptr : new bf16[2 * PASS * K]);
    for (int64_t n = n0; n < n1; n += 2 * PASS) {
        int64_t first = n + 2 * PASS <= w.N ? n : w.N - 2 * PASS;
        const bf16* block = w.format == BF16 ? (const bf16*)w.data + first * K : unpacked.get();
        for (int64_t r = 0; r < 2 * PASS && w.format != BF16; r++) unpack(&unpacked[r * K], w, first + r);
        for (int64_t m0 = 0; m0 < in.M; m0 += 32) {
            float sums[2][2 * PASS][16];
            int64_t left = in.M - m0;
            auto product = left > 16 ? lanes_bf16<2> : lanes_bf16<1>;
            for (int64_t r = 0; r < 2 * PASS; r += PASS) {
                const bf16* ahead = w.format == BF16 && m0 == 0 ? block + (2 * PASS + r) * K : block + r * K;
                product(block + r * K, &in.paired[m0 * K / 32], K, ahead, (float(*)[2 * PASS][16])sums[0][r]);
            }
            for (int64_t b = 0; 16 * b < left && b < 2; b++)
                put_block(y + (m0 + 16 * b) * w.width, w, first, sums[b], left - 16 * b < 16 ? left - 16 * b : 16, n, n1, add);
        }
    }
}
#endif

#if defined(TILES)
// 32 rows of weights, 16 and 16, with BLOCKS · 16 rows of activations → sums[2 · block +
// half][row of weights][row of activations]. Each step prefetches lines of the next rows.
template <int BLOCKS>
static void multiply_tiles(const bf16* w, const Line* x, int64_t K, float (*sums)[16][16]) {
    const bf16 *below = w + 16 * K, *ahead = w + 32 * K;
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t k = 0; k < K; k += 32, x += 16) {
        for (int r = 0; r < 32; r++) __builtin_prefetch(ahead + r * K + k, 0, 2);
        tile_load(4, w + k, 2 * K);
        tile_load(5, below + k, 2 * K);
        tile_load(6, x, 64);
        tile_dot_bf16(0, 4, 6);
        tile_dot_bf16(1, 5, 6);
        if (BLOCKS == 1) continue;
        tile_load(7, x + K / 2, 64);
        tile_dot_bf16(2, 4, 7);
        tile_dot_bf16(3, 5, 7);
    }
    tile_store(0, sums[0], 64);
    tile_store(1, sums[1], 64);
    tile_store(2, sums[2], 64);
    tile_store(3, sums[3], 64);
}

// As rows_lanes, with tiles and 32 rows of weights at a time.
static void rows_tiles(float* y, const Weight& w, const Input& in, int64_t n0, int64_t n1, bool add) {
    Tiles configured;
    std::vector<bf16> unpacked(w.format == BF16 ? 0 : 32 * w.K);
    for (int64_t n = n0; n < n1; n += 32) {
        int64_t first = n + 32 <= w.N ? n : w.N - 32, end = n + 32 < n1 ? n + 32 : n1;
        const bf16* block = w.format == BF16 ? (const bf16*)w.data + first * w.K : unpacked.data();
        for (int64_t r = 0; r < 32 && w.format != BF16; r++) unpack(&unpacked[r * w.K], w, first + r);
        for (int64_t m0 = 0; m0 < in.M; m0 += 32) {
            alignas(64) float sums[4][16][16];
            auto product = in.M - m0 > 16 ? multiply_tiles<2> : multiply_tiles<1>;
            product(block, &in.paired[m0 * w.K / 32], w.K, sums);
            for (int64_t b = 0; b < 4; b++) {  // two blocks of activations × two of weights
                int64_t left = in.M - m0 - b / 2 * 16, at = first + b % 2 * 16;
                if (left > 0) put_block(y + (m0 + b / 2 * 16) * w.width, w, at, sums[b], left < 16 ? left : 16, n, end, add);
            }
        }
    }
}
#endif

// R rows of blocks with C rows of activations, from n and m on.
template <class B, int R, int C>
static inline void block_blocks(float* y, const Weight& w, const Input& in, int64_t n, int64_t m, bool add) {
    float sums[R][C];
    dots_blocks<B, R, C>((const uint8_t*)w.data + n * (w.K / B::SIZE * B::BYTES), &in.codes[m], w.K, sums);
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) put(y + (m + c) * w.width, w, n + r, sums[r][c], add);
}

// Rows of blocks: four with a single row of activations, one with four.
template <class B>
static void rows_blocks(float* y, const Weight& w, const Input& in, int64_t n0, int64_t n1, bool add) {
    int64_t n = n0;
#if !defined(WIDE_PRODUCTS)
    for (; n < n1 && in.sums == FIXED; n++)
        for (int64_t m = 0; m < in.M; m++) {
            const uint8_t* row = (const uint8_t*)w.data + n * (w.K / B::SIZE * B::BYTES);
            put(y + m * w.width, w, n, dot_blocks_fixed<B>(row, &in.codes[m], w.K), add);
        }
#endif
    for (; n + TILE <= n1 && in.M == 1; n += TILE) block_blocks<B, TILE, 1>(y, w, in, n, 0, add);
    for (; n < n1; n++) {
        int64_t m = 0;
        for (; m + TILE <= in.M; m += TILE) block_blocks<B, 1, TILE>(y, w, in, n, m, add);
        for (; m < in.M; m++) block_blocks<B, 1, 1>(y, w, in, n, m, add);
    }
}

#if defined(WIDE_PRODUCTS)
// As rows_lanes, with 32 rows of blocks and 4 of activations at a time.
template <class B>
static void rows_panels(float* y, const Weight& w, const Input& in, int64_t n0, int64_t n1, bool add) {
    int64_t count = w.K / B::SIZE, bytes = count * B::BYTES, per = B::UNIT / B::SIZE, units = (count + per - 1) / per;
    std::unique_ptr<Panel<B>[]> panels(new Panel<B>[2 * units]);
    for (int64_t n = n0; n < n1; n += 32) {
        int64_t first = n + 32 <= w.N ? n : w.N - 32, end = n + 32 < n1 ? n + 32 : n1;
        for (int64_t i = 0; i < 2 * units; i++) {
            const uint8_t* p = (const uint8_t*)w.data + (first + i % 2 * 16) * bytes + i / 2 * per * B::BYTES;
            panels[i].fill(p, bytes, count - i / 2 * per);
        }
        for (int64_t m0 = 0; m0 < in.M; m0 += 4) {
            const Quad* x = &in.quads[m0 / 4 * groups_of_units(w.K)];
            __m512 sums[2][4] = {};
            for (int64_t u = 0; u < units; u++) add_panels<B>(&panels[2 * u], x + u * B::UNIT / GROUP, sums);
            for (int64_t m = m0; m < in.M && m < m0 + 4; m++)
                for (int h = 0; h < 2; h++)
                    put_some(y + m * w.width, w, first + 16 * h, (f32x16)sums[h][m - m0], n, end, add);
        }
    }
}
#endif

// Rows n0 … n1−1 of the weights. Each thread calls it with different rows.
static void rows(float* y, const Weight& w, const Input& in, int64_t n0, int64_t n1, bool add) {
    bool fixed = in.sums == FIXED;
    if (w.format == FP32) return (fixed ? rows_fixed<float> : rows_dense<float>)(y, w, in, n0, n1, add);
#if defined(TILES)
    if (in.paired && tiles_allowed()) return rows_tiles(y, w, in, n0, n1, add);
#endif
#if defined(__AVX512BF16__)
    const bf16* data = (const bf16*)w.data;
    if (!in.half.empty() && in.M == 1 && !fixed) {
        for (int64_t n = n0; n < n1; n++) put(y, w, n, dot_bf16(data + n * w.K, in.half.data(), w.K), add);
        return;
    }
    if (in.paired) return rows_lanes(y, w, in, n0, n1, add);
    if (!in.half.empty()) return rows_bf16(y, w, in, n0, n1, add);
#endif
    if (w.format == BF16) return (fixed ? rows_fixed<bf16> : rows_dense<bf16>)(y, w, in, n0, n1, add);
#if defined(WIDE_PRODUCTS)
    if (in.quads) return with_blocks(w.format, [&](auto type) { rows_panels<decltype(type)>(y, w, in, n0, n1, add); });
#endif
    if (w.format >= Q4_0) {
        with_blocks(w.format, [&](auto type) { rows_blocks<decltype(type)>(y, w, in, n0, n1, add); });
        return;
    }
    int64_t bytes = pairs_of(w.K) * GROUP;
    for (int64_t n = n0; n < n1; n++)
        for (int64_t m = 0; m < in.M; m++) {
            float value = w.format == INT8
                ? dot_int8((const uint8_t*)w.data + n * w.K, ((const float*)w.scale)[n], in.codes[m], w.K)
                : dot_int4((const uint8_t*)w.data + n * bytes, (const bf16*)w.scale + n * bytes / 16, in.codes[m], w.K);
            put(y + m * w.width, w, n, value, add);
        }
}

// Threads take parts of the weights dynamically, at least two parts per thread, so that an
// interrupted thread does not delay the others for long. With one row of activations a part of
// half a megabyte is long enough for the loads to run ahead. With several rows, the first lines
// of each part are not prefetched by the part before, so the parts are larger: 2 MB.
static void multiply(float* y, const float* x, int64_t M, const Weight& w, bool add, Sums sums) {
    struct Job {
        const Weight* w;
        const Input* in;
        float* y;
        int64_t from, to;
    };
    std::vector<Job> jobs;
    std::vector<std::unique_ptr<Input>> inputs;
    int64_t work = 0;
    for (const Weight* part = &w; part; y += part->N, part = part->next) {
        const Input* in = nullptr;
        for (auto& made : inputs)
            if (made->serves(*part)) in = made.get();
        if (!in) in = inputs.emplace_back(new Input(x, M, *part, sums)).get();
        int64_t bytes = row_bytes(*part), size = (1 << (M > TILE ? 21 : 19)) / bytes, most = w.width / (2 * threads());
        size = size > most ? most : size;
        size = size < 8 ? 8 : size < 32 ? size / 8 * 8 : size / 32 * 32;
        for (int64_t n = 0; n < part->N; n += size)
            jobs.push_back({part, in, y, n, n + size < part->N ? n + size : part->N});
        work += M * part->N * bytes;
    }
#pragma omp parallel for schedule(dynamic) if (work >= WORTH)
    for (size_t i = 0; i < jobs.size(); i++) rows(jobs[i].y, *jobs[i].w, *jobs[i].in, jobs[i].from, jobs[i].to, add);
}
