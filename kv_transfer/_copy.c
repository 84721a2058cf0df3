/* Copies scattered pages of a KV cache, digests them, or both at once, in one call with the
   interpreter lock released.

   The digest is XXH3 with 64 bits, that of the xxhash package, for pages that are whole stripes and
   for more bytes than its short forms take: specification at
   https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md. With the copy it is that of the
   very bytes that are written, so that memory is read once. */

#include "_pages.h"
#include "_streaming.h"

#include <stdatomic.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2 1
#include <immintrin.h>
#endif

/* Less is copied sooner than the lock is given away and taken back. */
#define MIN_UNLOCKED (64 << 10)

/* -- XXH3, where there is AVX2; elsewhere the package, which knows more instruction sets */

#define STRIPE 64
#define LANES 8
#define MIN_DIGESTED 241 /* fewer bytes have another form */

/* `left` counts the stripes to come, `inside` those of the block that were. */
typedef struct {
    uint64_t lanes[LANES];
    size_t left, inside;
} Digest;

static int has_avx2; /* set when the module is made, and never again */

#ifdef HAS_AVX2
#define BLOCK_STRIPES 16
#define SECRET_SIZE 192
#define SCRAMBLE_AT (SECRET_SIZE - STRIPE)
#define LAST_AT (SECRET_SIZE - STRIPE - 7)
#define MERGE_AT 11

static const uint32_t PRIME32_1 = 0x9E3779B1U, PRIME32_2 = 0x85EBCA77U, PRIME32_3 = 0xC2B2AE3DU;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87U, PRIME64_2 = 0xC2B2AE3D27D4EB4FU,
                      PRIME64_3 = 0x165667B19E3779F9U, PRIME64_4 = 0x85EBCA77C2B2AE63U,
                      PRIME64_5 = 0x27D4EB2F165667C5U, PRIME_MX1 = 0x165667919E3779F9U;
static const unsigned char SECRET[SECRET_SIZE] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#define AVX2 __attribute__((target("avx2")))
typedef __m256i Half;

AVX2 static inline Half half_at(const void *at)
{
    return _mm256_loadu_si256((const Half *)at);
}

AVX2 static inline Half mixed(Half lanes, Half value, Half secret)
{
    Half keyed = _mm256_xor_si256(value, secret);
    Half product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    Half swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, swapped));
}

AVX2 static inline Half scrambled(Half lanes, Half secret)
{
    Half prime = _mm256_set1_epi32((int)PRIME32_1);
    Half keyed = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)), secret);
    Half high = _mm256_mul_epu32(_mm256_srli_epi64(keyed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(keyed, prime), _mm256_slli_epi64(high, 32));
}

/* Takes `size` bytes, whole stripes, and writes them to `to` unless that is NULL. */
AVX2 static void absorb(Digest *digest, char *to, const char *from, size_t size,
                        const char *next_to, const char *next_from)
{
    Half low = half_at(digest->lanes), high = half_at(digest->lanes + 4);
    if (to != NULL && ((uintptr_t)to % sizeof(Half) || size < MIN_STREAMED)) {
        copy_page(to, from, size, next_to, next_from);
        to = NULL, next_to = NULL;
    }
    Ahead ahead = {0};
    for (size_t at = 0; at < size; at += STRIPE) {
        if (at % SPAN == 0)
            ahead = look_ahead(to, from, at, size, next_to, next_from);
        int is_last = --digest->left == 0;
        const unsigned char *secret = SECRET + (is_last ? LAST_AT : 8 * digest->inside);
        Half first = half_at(from + at), second = half_at(from + at + sizeof(Half));
        fetch(&ahead);
        if (to != NULL) {
            _mm256_stream_si256((Half *)(to + at), first);
            _mm256_stream_si256((Half *)(to + at + sizeof(Half)), second);
        }
        low = mixed(low, first, half_at(secret));
        high = mixed(high, second, half_at(secret + sizeof(Half)));
        if (is_last || ++digest->inside < BLOCK_STRIPES)
            continue;
        low = scrambled(low, half_at(SECRET + SCRAMBLE_AT));
        high = scrambled(high, half_at(SECRET + SCRAMBLE_AT + sizeof(Half)));
        digest->inside = 0;
    }
    _mm256_storeu_si256((Half *)digest->lanes, low);
    _mm256_storeu_si256((Half *)(digest->lanes + 4), high);
}

static uint64_t word(const unsigned char *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t folded(uint64_t a, uint64_t b)
{
    uint64_t low = (a & 0xFFFFFFFFU) * (b & 0xFFFFFFFFU), high = (a >> 32) * (b >> 32);
    uint64_t left = (a >> 32) * (b & 0xFFFFFFFFU), right = (a & 0xFFFFFFFFU) * (b >> 32);
    uint64_t middle = (low >> 32) + (left & 0xFFFFFFFFU) + right;
    return (middle << 32 | (low & 0xFFFFFFFFU)) ^ (high + (left >> 32) + (middle >> 32));
}

static void digest_begin(Digest *digest, size_t stripes)
{
    *digest = (Digest){{PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2,
                        PRIME64_5, PRIME32_1},
                       stripes, 0};
}

static uint64_t digest_end(const Digest *digest, uint64_t bytes)
{
    uint64_t value = bytes * PRIME64_1;
    for (int i = 0; i < LANES; i += 2)
        value += folded(digest->lanes[i] ^ word(SECRET + MERGE_AT + 8 * i),
                        digest->lanes[i + 1] ^ word(SECRET + MERGE_AT + 8 * i + 8));
    value = (value ^ value >> 37) * PRIME_MX1;
    return value ^ value >> 32;
}

#else
#define digest_begin(digest, stripes) ((void)(digest), (void)(stripes))
#define digest_end(digest, bytes) ((void)(digest), (uint64_t)(bytes))
static void absorb(Digest *digest, char *to, const char *from, size_t size, const char *next_to,
                   const char *next_from)
{
    (void)digest, (void)to, (void)from, (void)size, (void)next_to, (void)next_from;
}
#endif

/* -1 with an error where such bytes have another form of digest, or none is made here. */
static int digests(Py_ssize_t layers, Py_ssize_t blocks, Py_ssize_t size)
{
    if (has_avx2 && size % STRIPE == 0 && layers * blocks * size >= MIN_DIGESTED)
        return 0;
    PyErr_SetString(PyExc_ValueError, "AVX2, pages of whole stripes, and more than a few");
    return -1;
}

/* -- over the pages of some blocks */

static char *page_of(const Pages *pages, Py_ssize_t layer, Py_ssize_t block)
{
    return pages == NULL ? NULL
                         : pages->address + layer * pages->layer_stride
                               + pages->ids[block] * pages->block_stride;
}

/* Goes through the pages layer by layer; without `digest` none is made, without `ours` nothing is
   written. */
static void move_pages(Digest *digest, const Pages *ours, const Pages *theirs, Py_ssize_t layers,
                       Py_ssize_t blocks, size_t size)
{
    char *to = page_of(ours, 0, 0), *from = page_of(theirs, 0, 0);
    for (Py_ssize_t layer = 0, block = 0; layer < layers;) {
        Py_ssize_t is_end = ++block == blocks;
        layer += is_end;
        block = is_end ? 0 : block;
        char *next_to = layer < layers ? page_of(ours, layer, block) : to;
        char *next_from = layer < layers ? page_of(theirs, layer, block) : from;
        if (digest != NULL)
            absorb(digest, to, from, size, next_to, next_from);
        else
            copy_page(to, from, size, next_to, next_from);
        to = next_to, from = next_from;
    }
}

/* Without `ours` nothing is copied; with `digest` it is made. */
static void move(Digest *digest, const Pages *ours, const Pages *theirs, Py_ssize_t layers,
                 Py_ssize_t blocks, size_t size)
{
    PyThreadState *state = layers * blocks * (Py_ssize_t)size >= MIN_UNLOCKED
                               ? PyEval_SaveThread() : NULL;
    if (digest != NULL)
        digest_begin(digest, (size_t)(layers * blocks) * (size / STRIPE));
    if (layers > 0 && blocks > 0)
        move_pages(digest, ours, theirs, layers, blocks, size);
#ifdef __SSE2__
    _mm_sfence(); /* whoever is told of the copy finds it */
#endif
    if (state != NULL)
        PyEval_RestoreThread(state);
}

static PyObject *copied(PyObject *args, int is_digested)
{
    Py_ssize_t to, from, layers, size;
    Pages ours, theirs;
    Digest digest;
    PyObject *our_ids, *their_ids, *result = NULL;
    if (!PyArg_ParseTuple(args, "nnnO!nnnO!nn", &to, &ours.layer_stride, &ours.block_stride,
                          &PyList_Type, &our_ids, &from, &theirs.layer_stride,
                          &theirs.block_stride, &PyList_Type, &their_ids, &layers, &size))
        return NULL;
    ours.address = (char *)to, theirs.address = (char *)from;
    Py_ssize_t blocks = PyList_GET_SIZE(our_ids);
    if (PyList_GET_SIZE(their_ids) != blocks || size < 0) {
        PyErr_SetString(PyExc_ValueError, "as many blocks as places, and pages of some size");
        return NULL;
    }
    if (is_digested && digests(layers, blocks, size) < 0)
        return NULL;
    ours.ids = ids_of(our_ids);
    theirs.ids = ours.ids == NULL ? NULL : ids_of(their_ids);
    if (theirs.ids != NULL) {
        move(is_digested ? &digest : NULL, &ours, &theirs, layers, blocks, (size_t)size);
        result = is_digested
                     ? PyLong_FromUnsignedLongLong(
                           digest_end(&digest, (uint64_t)(layers * blocks * size)))
                     : Py_NewRef(Py_None);
    }
    PyMem_Free(theirs.ids);
    PyMem_Free(ours.ids);
    return result;
}

static PyObject *copy_pages(PyObject *self, PyObject *args)
{
    (void)self;
    return copied(args, 0);
}

static PyObject *copy_digested(PyObject *self, PyObject *args)
{
    (void)self;
    return copied(args, 1);
}

static PyObject *digest_pages(PyObject *self, PyObject *args)
{
    Py_ssize_t from, layers, size;
    Pages theirs;
    Digest digest;
    PyObject *ids;
    (void)self;
    if (!PyArg_ParseTuple(args, "nnnO!nn", &from, &theirs.layer_stride, &theirs.block_stride,
                          &PyList_Type, &ids, &layers, &size))
        return NULL;
    theirs.address = (char *)from;
    Py_ssize_t blocks = PyList_GET_SIZE(ids);
    if (digests(layers, blocks, size) < 0)
        return NULL;
    theirs.ids = ids_of(ids);
    if (theirs.ids == NULL)
        return NULL;
    move(&digest, NULL, &theirs, layers, blocks, (size_t)size);
    PyMem_Free(theirs.ids);
    return PyLong_FromUnsignedLongLong(digest_end(&digest, (uint64_t)(layers * blocks * size)));
}

/* -- one word of shared memory, which says whether what lies beside it may be read */

static PyObject *load_word(PyObject *self, PyObject *at)
{
    (void)self;
    Py_ssize_t address = PyLong_AsSsize_t(at);
    if (address == -1 && PyErr_Occurred())
        return NULL;
    atomic_thread_fence(memory_order_seq_cst); /* what was read before was read before */
    uint64_t value = atomic_load((_Atomic uint64_t *)address);
    return PyLong_FromUnsignedLongLong(value);
}

static PyObject *store_word(PyObject *self, PyObject *args)
{
    Py_ssize_t address;
    unsigned long long value;
    (void)self;
    if (!PyArg_ParseTuple(args, "nK", &address, &value))
        return NULL;
    atomic_store((_Atomic uint64_t *)address, (uint64_t)value);
    atomic_thread_fence(memory_order_seq_cst); /* what is written after is seen after */
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy_pages", copy_pages, METH_VARARGS, "See kv_transfer/copying.py."},
    {"copy_digested", copy_digested, METH_VARARGS, "See kv_transfer/copying.py."},
    {"digest_pages", digest_pages, METH_VARARGS, "See kv_transfer/copying.py."},
    {"load_word", load_word, METH_O, "See kv_transfer/copying.py."},
    {"store_word", store_word, METH_VARARGS, "See kv_transfer/copying.py."},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module)
{
#ifdef HAS_AVX2
    has_avx2 = __builtin_cpu_supports("avx2") != 0;
#endif
    return PyModule_AddObjectRef(module, "DIGESTS", has_avx2 ? Py_True : Py_False);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_copy", .m_size = 0, .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__copy(void)
{
    return PyModuleDef_Init(&module);
}
