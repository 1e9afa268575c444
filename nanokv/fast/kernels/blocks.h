// Weights in the blocks of a GGUF file, read as they are stored.
//
//     Q4_0, Q5_0, Q8_0   32 inputs: value = scale · (code − ZERO)
//     Q4_1, Q5_1         32 inputs: value = scale · code + least
//     Q4_K, Q5_K        256 inputs in 8 groups, each with a scale and a least value of 6 bits
//     Q6_K              256 inputs in 16 groups, each with a scale of 8 bits
//
// A type gives 32 inputs as a Group on every processor, and 256 as a Run where there are AVX-512 and
// its products of bytes (VNNI). Source of the layouts: ggml-common.h and ggml-quants.c of
// llama.cpp.

#pragma once
#include "vectors.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDE_PRODUCTS
#endif

static inline float half_at(const uint8_t* p) {  // fp16 → fp32
    uint16_t bits;
    memcpy(&bits, p, 2);
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    uint32_t wide = (uint32_t)(bits & 0x7fff) << 13;  // exponent and fraction, in their places
    float value;
    memcpy(&value, &wide, 4);
    value *= 0x1p112f;  // the difference of the biases; exact for denormals too
    if ((bits & 0x7c00) == 0x7c00) {
        wide |= 0x7f800000;
        memcpy(&value, &wide, 4);
    }
    return bits & 0x8000 ? -value : value;
#endif
}

static inline u8x16 bytes16(const uint8_t* p) { return *(const u8x16*)p; }

// 16 bits → 16 bytes, 16 for a set bit and 0 for the others.
static inline u8x16 fifth_bits(const uint8_t* p) {
    typedef uint64_t two __attribute__((vector_size(16)));
    const uint64_t repeat = 0x0101010101010101, each = 0x8040201008040201;
    two spread = {(p[0] * repeat) & each, (p[1] * repeat) & each};
    return (u8x16)((u8x16)spread != 0) & 16;
}

// 32 inputs: value = scale · code + least, with signed codes. Each half has its scale.
struct Group {
    u8x16 code[2];
    float scale[2], least;
};

#if defined(WIDE_PRODUCTS)
// A Run is 256 inputs, of which wide(i) gives the i-th 64 with codes from 0 on: value = scale ·
// (code − ZERO) + least. Lane j of the scale belongs to codes 4j … 4j+3. The least values are lanes
// of `all`: that of group g is lane place(g).
struct Wide {
    __m512i code;
    __m512 scale;
};

// Eight lanes `first` of `all`, then eight lanes `second`.
static inline __m512 two_lanes(__m512 all, int first, int second) {
    return _mm512_permutexvar_ps(_mm512_inserti64x4(_mm512_set1_epi32(first), _mm256_set1_epi32(second), 1), all);
}
// `count` adjacent blocks, 2 at most. No byte behind them is read.
template <int BYTES>
static inline __m512i two_blocks(const uint8_t* p, int64_t count) {
    uint64_t bytes = count >= 2 ? 2 * BYTES : count == 1 ? BYTES : 0;
    return _mm512_maskz_loadu_epi8(((__mmask64)1 << bytes) - 1, p);
}
// Of two blocks of WORDS words each: the low halves of 16 bytes from word FIRST on, then their high
// halves, for both blocks.
template <int FIRST, int WORDS>
static inline __m512i four_bits(__m512i two) {
    const __m512i shift = _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0), low4 = _mm512_set1_epi8(15);
    const int A = FIRST | (FIRST + 1) << 16, B = A + WORDS * 0x10001, next = 0x20002;
    const __m512i words = _mm512_setr_epi32(A, A + next, A + 2 * next, A + 3 * next, A, A + next, A + 2 * next, A + 3 * next,
                                            B, B + next, B + 2 * next, B + 3 * next, B, B + next, B + 2 * next, B + 3 * next);
    const int a = FIRST / 2, b = a + WORDS / 2;
    const __m512i pairs = _mm512_setr_epi32(a, a + 1, a + 2, a + 3, a, a + 1, a + 2, a + 3, b, b + 1, b + 2, b + 3, b, b + 1, b + 2, b + 3);
    bool even = FIRST % 2 == 0 && WORDS % 2 == 0;  // one instruction instead of two
    __m512i codes = even ? _mm512_permutexvar_epi32(pairs, two) : _mm512_permutexvar_epi16(words, two);
    return _mm512_and_si512(_mm512_srlv_epi64(codes, shift), low4);
}
static inline __m512i add_fifth(__m512i codes, __mmask64 bits) {
    return _mm512_mask_add_epi8(codes, bits, codes, _mm512_set1_epi8(16));
}
// The 32 bits at p, and those at `next` bytes behind it if there are two blocks.
static inline __mmask64 two_masks(const uint8_t* p, int next, int64_t count) {
    uint32_t low, high = 0;
    memcpy(&low, p, 4);
    if (count > 1) memcpy(&high, p + next, 4);
    return low | (uint64_t)high << 32;
}
#endif

// --- blocks of 32 inputs -------------------------------------------------------------------------

// BITS 4 or 5; LEAST: whether a block has a least value. Bytes: scale, least, fifth bits, codes.
template <int BITS, bool HAS_LEAST>
struct Small {
    static const int SIZE = 32, LEAST = HAS_LEAST, ZERO = LEAST ? 0 : 1 << (BITS - 1);
    static const int FIFTH = LEAST ? 4 : 2, CODES = FIFTH + (BITS == 5 ? 4 : 0), BYTES = CODES + 16;
    static inline Group group(const uint8_t* row, int64_t g) {
        const uint8_t* block = row + g * BYTES;
        u8x16 both = bytes16(block + CODES), low = both & 15, high = both >> 4;
        if (BITS == 5) low |= fifth_bits(block + FIFTH), high |= fifth_bits(block + FIFTH + 2);
        float scale = half_at(block);
        return {{low - (uint8_t)ZERO, high - (uint8_t)ZERO}, {scale, scale}, LEAST ? half_at(block + 2) : 0};
    }
#if defined(WIDE_PRODUCTS)
    struct Run {
        const uint8_t* start;
        int64_t count;  // of blocks, 8 at most
        __m512i two[4];
        __m512 all;  // 4 lanes for two blocks, from the first 4 bytes of each block
        Run(const uint8_t* row, int64_t k, int64_t count) : start(row + k / SIZE * BYTES), count(count) {
            for (int i = 0; i < 4; i++) two[i] = two_blocks<BYTES>(start + 2 * i * BYTES, count - 2 * i);
            const int b = BYTES / 4;
            const __m512i four = _mm512_setr_epi32(0, b, 16, 16 + b, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
            __m512i first = _mm512_permutex2var_epi32(two[0], four, two[1]);
            __m512i second = _mm512_permutex2var_epi32(two[2], four, two[3]);
            __m256i eight = _mm256_set_m128i(_mm512_castsi512_si128(second), _mm512_castsi512_si128(first));
            all = _mm512_cvtph_ps(eight);
        }
        static inline int place(int g) { return 2 * g + 1; }
        inline Wide wide(int i) const {
            __m512i codes = four_bits<CODES / 2, BYTES / 2>(two[i]);
            const uint8_t* at = start + 2 * i * BYTES;
            if (BITS == 5) codes = add_fifth(codes, two_masks(at + FIFTH, BYTES, count - 2 * i));
            // The second scale is the upper half of its 4 bytes if blocks have an odd number of words.
            return {codes, two_lanes(all, 4 * i, 4 * i + 2 + BYTES / 2 % 2)};
        }
    };
#endif
};

struct Eight {  // Q8_0
    static const int SIZE = 32, LEAST = 0, ZERO = 128, BYTES = 34;
    static inline Group group(const uint8_t* row, int64_t g) {
        const uint8_t* block = row + g * BYTES;
        float scale = half_at(block);
        return {{bytes16(block + 2), bytes16(block + 18)}, {scale, scale}, 0};
    }
#if defined(WIDE_PRODUCTS)
    struct Run {
        const uint8_t* start;
        int64_t count;
        Run(const uint8_t* row, int64_t k, int64_t count) : start(row + k / SIZE * BYTES), count(count) {}
        inline Wide wide(int i) const {
            const uint8_t *first = start + 2 * i * BYTES, *second = count > 2 * i + 1 ? first + BYTES : first;
            int16_t a, b;
            memcpy(&a, first, 2), memcpy(&b, second, 2);
            __m256i low = _mm256_loadu_si256((const __m256i*)(first + 2)), high = _mm256_loadu_si256((const __m256i*)(second + 2));
            __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
            __m256i scales = _mm256_set_m128i(_mm_set1_epi16(b), _mm_set1_epi16(a));
            return {_mm512_xor_si512(codes, _mm512_set1_epi8((char)ZERO)), _mm512_cvtph_ps(scales)};
        }
    };
#endif
};

// --- blocks of 256 inputs ------------------------------------------------------------------------

// The 12 bytes of 8 scales and 8 least values in 6 bits → one byte each.
static inline u8x16 six_bits(const uint8_t* p) {
    typedef uint32_t four __attribute__((vector_size(16)));
    uint32_t a, b, c;
    memcpy(&a, p, 4), memcpy(&b, p + 4, 4), memcpy(&c, p + 8, 4);
    uint32_t upper_scales = (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030);
    uint32_t upper_least = (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030);
    return (u8x16)(four){a & 0x3f3f3f3f, upper_scales, b & 0x3f3f3f3f, upper_least};
}

// Q4_K and Q5_K. Bytes: scale, scale of the least values, 12 of six_bits, fifth bits, codes.
template <int BITS>
struct Large {
    static const int SIZE = 256, LEAST = 1, ZERO = 0, CODES = BITS == 5 ? 48 : 16, BYTES = CODES + 128;
    static inline Group group(const uint8_t* row, int64_t g) {
        const uint8_t *block = row + g / 8 * BYTES, *at = block + CODES + g % 8 / 2 * 32;
        int in_block = (int)(g % 8);
        Group found;
        for (int i = 0; i < 2; i++) {
            u8x16 both = bytes16(at + 16 * i), codes = g % 2 ? both >> 4 : both & 15;
            if (BITS == 5) codes |= (bytes16(block + 16 + 16 * i) >> in_block & 1) << 4;
            found.code[i] = codes;
        }
        u8x16 six = six_bits(block + 4);
        found.scale[0] = found.scale[1] = half_at(block) * six[in_block];
        found.least = -(half_at(block + 2) * six[8 + in_block]);
        return found;
    }
#if defined(WIDE_PRODUCTS)
    struct Run {
        const uint8_t* block;
        __m512 all;  // 8 scales, 8 least values
        Run(const uint8_t* row, int64_t k, int64_t) : block(row + k / SIZE * BYTES) {
            __m512 six = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)six_bits(block + 4)));
            all = six * _mm512_insertf32x8(_mm512_set1_ps(half_at(block)), _mm256_set1_ps(-half_at(block + 2)), 1);
        }
        static inline int place(int g) { return 8 + g; }
        inline Wide wide(int i) const {
            const __m512i shift = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0), low4 = _mm512_set1_epi8(15);
            __m512i pairs = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(block + CODES + 32 * i)));
            __m512i codes = _mm512_and_si512(_mm512_srlv_epi64(pairs, shift), low4);
            if (BITS == 5) {
                __m512i fifth = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(block + 16)));
                __m512i bits = _mm512_inserti64x4(_mm512_set1_epi8((char)(1 << 2 * i)), _mm256_set1_epi8((char)(2 << 2 * i)), 1);
                codes = add_fifth(codes, _mm512_test_epi8_mask(fifth, bits));
            }
            return {codes, two_lanes(all, 2 * i, 2 * i + 1)};
        }
    };
#endif
};

// Q6_K. Bytes: 128 with the lower 4 bits, 64 with the upper 2, 16 scales, the scale of the scales.
struct Six {
    static const int SIZE = 256, LEAST = 0, ZERO = 32, BYTES = 210;
    static inline Group group(const uint8_t* row, int64_t g) {
        const uint8_t* block = row + g / 8 * BYTES;
        int half = (int)(g % 8 / 4), part = (int)(g % 4);
        Group found;
        for (int i = 0; i < 2; i++) {
            u8x16 low = bytes16(block + 64 * half + part % 2 * 32 + 16 * i);
            u8x16 high = bytes16(block + 128 + 32 * half + 16 * i);
            found.code[i] = ((part < 2 ? low & 15 : low >> 4) | (high >> 2 * part & 3) << 4) - (uint8_t)ZERO;
            found.scale[i] = half_at(block + 208) * (int8_t)block[192 + g % 8 * 2 + i];
        }
        found.least = 0;
        return found;
    }
#if defined(WIDE_PRODUCTS)
    struct Run {
        const uint8_t* block;
        __m512 all;  // 16 scales
        Run(const uint8_t* row, int64_t k, int64_t) : block(row + k / SIZE * BYTES) {
            __m512i eight = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(block + 192)));
            all = _mm512_cvtepi32_ps(eight) * half_at(block + 208);
        }
        inline Wide wide(int i) const {
            int upper = i % 2 * 4;  // the first 64 inputs of 128 are in the low halves
            __m512i low = _mm512_loadu_si512(block + i / 2 * 64);
            __m512i four = _mm512_and_si512(_mm512_srli_epi16(low, upper), _mm512_set1_epi8(15));
            __m512i high = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(block + 128 + i / 2 * 32)));
            __m512i shift = _mm512_inserti64x4(_mm512_set1_epi64(upper), _mm256_set1_epi64x(upper + 2), 1);
            __m512i two = _mm512_and_si512(_mm512_srlv_epi64(high, shift), _mm512_set1_epi8(3));
            __m512i index = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
            __m512 scale = _mm512_permutexvar_ps(_mm512_add_epi32(index, _mm512_set1_epi32(4 * i)), all);
            return {_mm512_or_si512(four, _mm512_slli_epi16(two, 4)), scale};
        }
    };
#endif
};

// --- by format -----------------------------------------------------------------------------------

// f(type) for one of the formats from Q4_0 on.
template <class F>
static inline auto with_blocks(int32_t format, F f) {
    switch (format) {
        case Q4_0: return f(Small<4, false>());
        case Q4_1: return f(Small<4, true>());
        case Q5_0: return f(Small<5, false>());
        case Q5_1: return f(Small<5, true>());
        case Q8_0: return f(Eight());
        case Q4_K: return f(Large<4>());
        case Q5_K: return f(Large<5>());
        default: return f(Six());
    }
}

static inline int64_t bytes_of_blocks(int32_t format, int64_t K) {
    return with_blocks(format, [&](auto type) -> int64_t { return K / decltype(type)::SIZE * decltype(type)::BYTES; });
}

// A row of blocks as bf16 or fp32. The fp32 values are those of llama.cpp and the gguf package.
template <class B, class T>
static inline void unpack_blocks(T* to, const uint8_t* row, int64_t K) {
    for (int64_t g = 0; g * GROUP < K; g++) {
        Group group = B::group(row, g);
        for (int i = 0; i < 2; i++) {
            f32x16 value = load16((const int8_t*)&group.code[i]) * group.scale[i];
            if (B::LEAST) value = apart(value) + group.least;
            store16(to + g * GROUP + 16 * i, value);
        }
    }
}
