/* AES-256 in counter mode (FIPS 197, SP 800-38A) for _random.py, by the processor's own AES instructions: nothing is looked up in tables, so
   time tells nothing of the key.  Compiled to nothing where the processor has none.  The round function is iterated over eight registers at
   once, because one round of one register takes several cycles and a new one can begin every cycle. */

#ifdef __AES__

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

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

#endif
