// Weights in the blocks of a GGUF file, read as they are stored.
//
//     Q4_0, Q5_0, Q8_0   32 inputs: value = scale · (code − ZERO)
//     Q4_1, Q5_1         32 inputs: value = scale · code + least
//     Q4_K, Q5_K        256 inputs in 8 groups, each with a scale and a least value of 6 bits
//     Q6_K              256 inputs in 16 groups, each with a scale of 8 bits
//
// A type gives 32 inputs as a Group on every processor, and 128 or 256 as a Unit where there are
// AVX-512 and its products of bytes (VNNI). Source of the layouts: ggml-common.h and ggml-quants.c of
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
// A Unit is the next UNIT inputs of a row, with codes from 0 on: value = scale · (code − ZERO) +
// sign · least.
//
//     codes(i)      64 codes; chunk(c) says which 16 inputs are the c-th 16 codes of the unit
//     all           scales and least values: those of group g are lanes scale_at(g, half) and
//                   least_at(g). A group has SCALES, 1 or one for each half
//     spread(v, i)  lane j: the lane of v with the scale of codes 4j … 4j+3 of codes(i)
//
// SHARED steps of 64 codes have the same scales. `count` is the number of blocks left in the row: a
// unit that has more takes the first one again, and the activations there are zeros.

static inline __m512i low_halves(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
static inline __m512i high_halves(__m512i bytes) { return low_halves(_mm512_srli_epi16(bytes, 4)); }
static inline __m512i add_fifth(__m512i codes, __mmask64 bits) {
    return _mm512_mask_add_epi8(codes, bits, codes, _mm512_set1_epi8(16));
}
// Eight lanes `first` of v, then eight lanes `second`.
static inline __m512 two_lanes(__m512 v, int first, int second) {
    return _mm512_permutexvar_ps(_mm512_inserti64x4(_mm512_set1_epi32(first), _mm256_set1_epi32(second), 1), v);
}

struct Four {  // adjacent blocks of 32 inputs
    const uint8_t* at[4];
    Four(const uint8_t* p, int64_t bytes, int64_t count) {
        for (int b = 0; b < 4; b++) at[b] = p + (b < count ? b * bytes : 0);
    }
    inline __m128i words(int offset) const {  // 4 bytes of each
        int32_t word[4];
        for (int b = 0; b < 4; b++) memcpy(&word[b], at[b] + offset, 4);
        return _mm_setr_epi32(word[0], word[1], word[2], word[3]);
    }
    inline __m512i lines(int offset) const {  // 16 bytes of each
        auto line = [&](int b) { return _mm_loadu_si128((const __m128i*)(at[b] + offset)); };
        __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(line(0)), line(1), 1);
        __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(line(2)), line(3), 1);
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    // Lanes 2b and 2b+1: the first two fp16 of block b. A second one that is a code is never used.
    inline __m512 halves() const { return _mm512_castps256_ps512(_mm256_cvtph_ps(words(0))); }
};
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
    static const int UNIT = 128, SHARED = 2, SCALES = 1;
    static inline int chunk(int c) { return c % 4 * 2 + c / 4; }
    static inline int scale_at(int g, int) { return 2 * g; }
    static inline int least_at(int g) { return 2 * g + 1; }
    struct Unit {
        __m512i both, fifth;
        __m512 all;
        Unit(const uint8_t* p, int64_t count) {
            Four four(p, BYTES, count);
            both = four.lines(CODES);
            all = four.halves();
            if (BITS == 5) fifth = _mm512_permutexvar_epi32(quarters(1), _mm512_castsi128_si512(four.words(FIFTH)));
        }
        static inline __m512i quarters(int step) {  // 0, step, 2·step and 3·step, four lanes each
            return _mm512_mullo_epi32(_mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0), _mm512_set1_epi32(step));
        }
        inline __m512i codes(int i) const {
            __m512i codes = i ? high_halves(both) : low_halves(both);
            if (BITS == 4) return codes;
            const __m128i index = _mm_set_epi64x(0x0101010101010101 * (2 * i + 1), 0x0101010101010101 * (2 * i));
            __m512i bytes = _mm512_shuffle_epi8(fifth, _mm512_broadcast_i32x4(index));
            return add_fifth(codes, _mm512_test_epi8_mask(bytes, _mm512_set1_epi64((int64_t)0x8040201008040201)));
        }
        static inline __m512 spread(__m512 v, int) { return _mm512_permutexvar_ps(quarters(2), v); }
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
    static const int UNIT = 128, SHARED = 1, SCALES = 1;
    static inline int chunk(int c) { return c; }
    static inline int scale_at(int g, int) { return 2 * g; }
    static inline int least_at(int g) { return 2 * g + 1; }
    struct Unit {
        Four four;
        __m512 all;
        Unit(const uint8_t* p, int64_t count) : four(p, BYTES, count), all(four.halves()) {}
        inline __m512i codes(int i) const {
            auto half = [&](int b) { return _mm256_loadu_si256((const __m256i*)(four.at[b] + 2)); };
            __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(half(2 * i)), half(2 * i + 1), 1);
            return _mm512_xor_si512(codes, _mm512_set1_epi8((char)ZERO));
        }
        static inline __m512 spread(__m512 v, int i) { return two_lanes(v, 4 * i, 4 * i + 2); }
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
#if defined(WIDE_PRODUCTS)
// The same of the first 16 bytes of a block, without leaving the vector registers.
static inline __m128i six_bits16(__m128i head) {
    const __m128i low = _mm_setr_epi8(4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i high = _mm_setr_epi8(-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1, 8, 9, 10, 11);  // -1: 0
    __m128i lower = _mm_srlv_epi32(_mm_shuffle_epi8(head, low), _mm_setr_epi32(0, 0, 0, 4));
    __m128i upper = _mm_srli_epi32(_mm_shuffle_epi8(head, high), 2);
    const __m128i masks = _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f);
    return _mm_or_si128(_mm_and_si128(lower, masks), _mm_and_si128(upper, _mm_set1_epi8(0x30)));
}
#endif

// Q4_K and Q5_K. Bytes: scale, scale of the least values, 12 of six_bits, fifth bits, codes.
template <int BITS>
struct Large {
    static const int SIZE = 256, LEAST = -1, ZERO = 0, CODES = BITS == 5 ? 48 : 16, BYTES = CODES + 128;
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
    static const int UNIT = 256, SHARED = 1, SCALES = 1;
    // Steps of groups 0 and 2, 1 and 3, 4 and 6, 5 and 7: the halves of 64 bytes.
    static inline int chunk(int c) { return c / 8 * 8 + c / 4 % 2 * 2 + c / 2 % 2 * 4 + c % 2; }
    static inline int scale_at(int g, int) { return g; }
    static inline int least_at(int g) { return 8 + g; }
    struct Unit {
        const uint8_t* block;
        __m512 all;
        Unit(const uint8_t* p, int64_t) : block(p) {
            __m128i head = _mm_loadu_si128((const __m128i*)p);
            __m512 scales = _mm512_castps128_ps512(_mm_cvtph_ps(head));
            all = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(six_bits16(head))) * two_lanes(scales, 0, 1);
        }
        inline __m512i codes(int i) const {
            __m512i bytes = _mm512_loadu_si512(block + CODES + i / 2 * 64);
            __m512i codes = i % 2 ? high_halves(bytes) : low_halves(bytes);
            if (BITS == 4) return codes;
            int bit = 1 << (i / 2 * 4 + i % 2);
            __m512i fifth = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(block + 16)));
            __m512i bits = _mm512_inserti64x4(_mm512_set1_epi8((char)bit), _mm256_set1_epi8((char)(4 * bit)), 1);
            return add_fifth(codes, _mm512_test_epi8_mask(fifth, bits));
        }
        static inline __m512 spread(__m512 v, int i) { return two_lanes(v, i / 2 * 4 + i % 2, i / 2 * 4 + i % 2 + 2); }
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
    static const int UNIT = 256, SHARED = 1, SCALES = 2;
    static inline int chunk(int c) { return c; }
    static inline int scale_at(int g, int half) { return 2 * g + half; }
    static inline int least_at(int) { return 0; }
    struct Unit {
        const uint8_t* block;
        __m512 all;
        Unit(const uint8_t* p, int64_t) : block(p) {
            __m512i scales = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + 192)));
            all = _mm512_cvtepi32_ps(scales) * half_at(p + 208);
        }
        inline __m512i codes(int i) const {
            __m512i low = _mm512_loadu_si512(block + i / 2 * 64);
            __m512i high = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(block + 128 + i / 2 * 32)));
            // The upper two bits → bits 4 and 5: of the first 32 codes, then of the others.
            const __m512i left = _mm512_set_epi64(2, 2, 2, 2, 4, 4, 4, 4), right = _mm512_set_epi64(2, 2, 2, 2, 0, 0, 0, 0);
            high = i % 2 ? _mm512_srlv_epi64(high, right) : _mm512_sllv_epi64(high, left);
            low = i % 2 ? _mm512_srli_epi16(low, 4) : low;
            const int choose = 0xca;  // a ? b : c, bit by bit
            __m512i both = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low, high, choose);
            return _mm512_and_si512(both, _mm512_set1_epi8(63));
        }
        static inline __m512 spread(__m512 v, int i) {
            const __m512i index = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
            return _mm512_permutexvar_ps(_mm512_add_epi32(index, _mm512_set1_epi32(4 * i)), v);
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
