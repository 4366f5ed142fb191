/* The random numbers of _random.py: words from AES, normals from words, and both in one go.

   ---- Normals: Box-Muller on segments of 2 S words, S = 512.  Additions, products, fused products, one division and one square root in
   double, each rounded to nearest and nothing else contracted (-ffp-contract=off), so the same words give the same bits on every machine and
   for any width of vector.  Loops are written for a vectorising compiler: no branch, and integers become doubles by placing their bits in a
   mantissa, which needs no conversion instruction.

   Coefficients: the polynomials of log, sin and cos in fdlibm 5.3 (Sun Microsystems, 1993): e_log.c, k_sin.c, k_cos.c.  Every normal is
   within 2e-15 of its exact value. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { S = 512 };

static inline double as_double(uint64_t bits) { double x; memcpy(&x, &bits, 8); return x; }
static inline uint64_t as_bits(double x) { uint64_t bits; memcpy(&bits, &x, 8); return bits; }

/* 0 <= x < 2^63, rounded to nearest: the upper half in the mantissa of 2^84, the lower in that of 2^52. */
static inline double to_double(uint64_t x) {
    double upper = as_double((x >> 32) | 0x4530000000000000u) - (0x1p84 + 0x1p52);
    return upper + as_double((x & 0xffffffffu) | 0x4330000000000000u);
}

/* -2 log(u / 2^63): u = m 2^k with m in [sqrt(1/2), sqrt(2)), log m = 2 artanh(s) with s = (m - 1) / (m + 1). */
static inline double radius_squared(double u) {
    uint64_t exponent = (as_bits(u) - 0x3fe6a09e667f3bcdu) & 0xfff0000000000000u;
    double m = as_double(as_bits(u) - exponent);
    double k = as_double(((exponent + 0x4000000000000000u) >> 52) | 0x4330000000000000u) - (0x1p52 + 1024);
    double s = (m - 1) / (m + 1), z = s * s;
    double series = z * fma(z, fma(z, fma(z, fma(z, fma(z, fma(z, 0x1.2f112df3e5244p-3, 0x1.39a09d078c69fp-3), 0x1.7466496cb03dep-3), 0x1.c71c51d8e78afp-3), 0x1.2492494229359p-2), 0x1.999999997fa04p-2), 0x1.5555555555593p-1);
    return fma(s, series + 2, (k - 63) * 0x1.62e42fefa39efp-1) * -2;
}

/* sin x and cos x for |x| <= pi/4. */
static inline double sine(double x, double z) {
    return fma(x, z * fma(z, fma(z, fma(z, fma(z, fma(z, 0x1.5d93a5acfd57cp-33, -0x1.ae5e68a2b9cebp-26), 0x1.71de357b1fe7dp-19), -0x1.a01a019c161d5p-13), 0x1.111111110f8a6p-7), -0x1.5555555555549p-3), x);
}
static inline double cosine(double z) {
    return 1 - (z * 0.5 - z * z * fma(z, fma(z, fma(z, fma(z, fma(z, -0x1.8fae9be8838d4p-37, 0x1.1ee9ebdb4b1c4p-29), -0x1.27e4f809c52adp-22), 0x1.a01a019cb159p-16), -0x1.6c16c16c15177p-10), 0x1.555555555554cp-5));
}

/* The pair of normals of words a and b, times scale: a gives the radius, b = quadrant 2^62 + rest the angle pi b / 2^63; a negative zero of
   cos or sin is as good as zero.  Returns the radius times scale. */
static inline double pair(uint64_t a, uint64_t b, double scale, double *of_cosine, double *of_sine) {
    uint64_t negative = -(a >> 63);
    double r = scale * sqrt(radius_squared(to_double((a ^ negative) - negative)));
    uint64_t quadrant = (b + 0x2000000000000000u) & 0xc000000000000000u, odd = -(quadrant >> 62 & 1);
    double x = (to_double(b - quadrant + 0x2000000000000000u) - 0x1p61) * 0x1.921fb54442d18p-62;
    uint64_t s = as_bits(sine(x, x * x)), c = as_bits(cosine(x * x)), swapped = (s ^ c) & odd;
    c ^= swapped ^ ((quadrant ^ quadrant << 1) & 0x8000000000000000u);
    s ^= swapped ^ (quadrant & 0x8000000000000000u);
    *of_cosine = r * as_double(c);
    *of_sine = r * as_double(s);
    return r;
}

#define NORMALS(name, type, is)                                                    \
    void name(const uint64_t *words, int64_t segments, double scale, type *out) {  \
        for (; segments > 0; segments--, words += 2 * S, out += 2 * S) {           \
            for (int p = 0; p < S; p++) {                                          \
                double c, s;                                                       \
                pair(words[p] | 1, words[S + p], scale, &c, &s);                   \
                out[p] is (type)c;                                                 \
                out[S + p] is (type)s;                                             \
            }                                                                      \
        }                                                                          \
    }

NORMALS(normals_float, float, =)
NORMALS(normals_double, double, =)
NORMALS(add_normals_float, float, +=)
NORMALS(add_normals_double, double, +=)

/* y to the nearest whole number, NaN if it is within `slack` of the middle between two: 2^52 x 1.5 leaves no room for a fraction. */
static inline double rounded(double y, double slack) {
    double n = y + 0x1.8p52 - 0x1.8p52;
    return as_double(as_bits(n) | (fabs(y - n) < 0.5 - slack ? 0 : 0x7ff8000000000000u));
}

/* scale z to the nearest whole number, for z of real uniforms of which `words` are the first bits; NaN where later bits, or an error of z
   of `error`, could decide.  |scale z| < 2^51.  The cell of u is u_p +- 2^-63, so the radius differs by at most 2 / ((|a_p| - 1) r). */
void rounded_normals(const uint64_t *words, int64_t segments, double scale, double error, double *out) {
    for (; segments > 0; segments--, words += 2 * S, out += 2 * S) {
        for (int p = 0; p < S; p++) {
            double c, s;
            uint64_t a = words[p] | 1, negative = -(a >> 63);
            double r = pair(a, words[S + p], scale, &c, &s), below = to_double(((a ^ negative) - negative) - 1);
            double slack = scale * error + 2 * scale * scale / (below * r);
            out[p] = rounded(c, slack);
            out[S + p] = rounded(s, slack);
        }
    }
}

#ifdef __AES__

/* ---- Words: AES-256 in counter mode (FIPS 197, SP 800-38A) by the processor's own AES instructions: nothing is looked up in tables, so time
   tells nothing of the key.  Eight registers go through the rounds together, because one round of one register takes several cycles and a
   new one can begin every cycle. */

#include <immintrin.h>

enum { ROUNDS = 14, REGISTERS = 8 };

#if defined(__VAES__) && defined(__AVX2__)
enum { LANES = 2 };  /* blocks in a register */
typedef __m256i Blocks;
#define ROUND _mm256_aesenc_epi128
#define LAST _mm256_aesenclast_epi128
#define XOR _mm256_xor_si256
#define STORE(at, x) _mm256_storeu_si256((__m256i *)(at), x)
static inline Blocks every_lane(__m128i x) { return _mm256_broadcastsi128_si256(x); }
static inline Blocks counters(uint64_t high, uint64_t j) {
    return _mm256_set_epi64x(__builtin_bswap64(j + 1), high, __builtin_bswap64(j), high);
}
#else
enum { LANES = 1 };
typedef __m128i Blocks;
#define ROUND _mm_aesenc_si128
#define LAST _mm_aesenclast_si128
#define XOR _mm_xor_si128
#define STORE(at, x) _mm_storeu_si128((__m128i *)(at), x)
static inline Blocks every_lane(__m128i x) { return x; }
static inline Blocks counters(uint64_t high, uint64_t j) { return _mm_set_epi64x(__builtin_bswap64(j), high); }
#endif

enum { GROUP = LANES * REGISTERS };

/* Each word of x plus (exclusive or) those before it. */
static inline __m128i running(__m128i x) {
    x = _mm_xor_si128(x, _mm_slli_si128(x, 4));
    return _mm_xor_si128(x, _mm_slli_si128(x, 8));
}

static void expand(const uint8_t key[32], __m128i k[ROUNDS + 1]) {
    k[0] = _mm_loadu_si128((const __m128i *)key);
    k[1] = _mm_loadu_si128((const __m128i *)(key + 16));
#define EVEN(i, rcon) k[i] = _mm_xor_si128(running(k[i - 2]), _mm_shuffle_epi32(_mm_aeskeygenassist_si128(k[i - 1], rcon), 0xff))
#define ODD(i) k[i] = _mm_xor_si128(running(k[i - 2]), _mm_shuffle_epi32(_mm_aeskeygenassist_si128(k[i - 1], 0), 0xaa))
    EVEN(2, 0x01); ODD(3); EVEN(4, 0x02); ODD(5); EVEN(6, 0x04); ODD(7); EVEN(8, 0x08); ODD(9);
    EVEN(10, 0x10); ODD(11); EVEN(12, 0x20); ODD(13); EVEN(14, 0x40);
}

static inline void group(const Blocks k[ROUNDS + 1], uint64_t high, uint64_t j, uint8_t *out) {
    Blocks x[REGISTERS];
    for (int i = 0; i < REGISTERS; i++) x[i] = XOR(counters(high, j + LANES * i), k[0]);
#pragma GCC unroll 13
    for (int r = 1; r < ROUNDS; r++)
        for (int i = 0; i < REGISTERS; i++) x[i] = ROUND(x[i], k[r]);
    for (int i = 0; i < REGISTERS; i++) STORE(out + 16 * LANES * i, LAST(x[i], k[ROUNDS]));
}

/* Blocks [first, first + blocks) of the stream whose counter blocks begin with `high`; both halves are big-endian, as in SP 800-38A. */
void keystream(const uint8_t key[32], uint64_t high, uint64_t first, int64_t blocks, uint8_t *out) {
    __m128i once[ROUNDS + 1];
    Blocks k[ROUNDS + 1];
    expand(key, once);
    for (int r = 0; r <= ROUNDS; r++) k[r] = every_lane(once[r]);
    high = __builtin_bswap64(high);
    for (; blocks >= GROUP; blocks -= GROUP, first += GROUP, out += 16 * GROUP) group(k, high, first, out);
    if (blocks > 0) {
        uint8_t rest[16 * GROUP];
        group(k, high, first, rest);
        memcpy(out, rest, 16 * blocks);
    }
}

#ifdef _OPENMP

/* ---- Both: segments [first, first + segments) of a vector of normals, written to `out` or added to it, on torch's threads. */
#define NOISE(name, type)                                                                                              \
    void name(const uint8_t key[32], uint64_t high, int64_t first, int64_t segments, double scale, int add, type *out, \
              int threads) {                                                                                           \
        _Pragma("omp parallel for schedule(dynamic, 32) num_threads(threads)")                                         \
        for (int64_t segment = 0; segment < segments; segment++) {                                                     \
            uint64_t words[2 * S];                                                                                     \
            keystream(key, high, (first + segment) * S, S, (uint8_t *)words);                                          \
            (add ? add_normals_##type : normals_##type)(words, 1, scale, out + segment * 2 * S);                       \
        }                                                                                                              \
    }

NOISE(noise_float, float)
NOISE(noise_double, double)

#endif
#endif
