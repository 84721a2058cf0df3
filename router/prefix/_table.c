/* The prefix index's table of machine words: 64-bit chain hash -> number of a set. See table.py.

   Sharded by the top bits of the mixed hash, so that no one call has much to move. Within a shard
   the entries are in the order of their mixed hashes, each at its home or behind it, with no gap
   between (Amble and Knuth, Ordered hash tables, The Computer Journal 17, 1974). So a search for
   what is not there ends as soon as one for what is, a shard grows in one pass from its first entry
   to its last, and what is removed leaves no mark: the entries behind it move up.

   Hashes come from other machines. They are mixed with a secret number of this process, so that
   nobody can choose many that have one home. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#ifdef __GNUC__
#define PREFETCH(at) __builtin_prefetch(at)
#else
#define PREFETCH(at) ((void)(at))
#endif
#define LINE 64

#define SHARD_BITS 10
#define SHARDS (1 << SHARD_BITS)
#define ABSENT UINT32_MAX
/* Slots behind the last home, or more where they are needed. The very last stays empty: there every
   search ends. */
#define SPARE 32
#define MIN_HOMES 8
/* More goes back to the system at once, not to an allocator that keeps holes. */
#define MIN_MAPPED (16 << 10)
/* Memory is asked for so many searches ahead. */
#define AHEAD 16
/* And so many where a prompt has several runs, whose lengths nobody knows. */
#define FAR_AHEAD 128
/* In a chain one block in so many is looked at, then one in STEP times fewer where these differ. */
#define STRIDE 64
#define STEP 8
/* One run ends here, that what follows it finds the same memory in the caches. */
#define MAX_RUN 1024
#define HASH ((Py_ssize_t)sizeof(uint64_t))
#define SET ((Py_ssize_t)sizeof(uint32_t))

/* 12 bytes, which need no alignment to eight. */
typedef struct {
    uint32_t key[2], set;
} Entry;

typedef struct {
    Entry *entries;
    uint32_t homes, slots, used;
} Shard;

typedef struct {
    PyObject_HEAD
    uint64_t secret;
    Py_ssize_t used;
    /* Who is in a set, one bit each: `width` words for each of `sets`. */
    uint64_t *masks;
    size_t sets, width;
    Shard shards[SHARDS];
} Table;

/* An array of machine words that was given to a call. */
typedef struct {
    Py_buffer view;
    Py_ssize_t count;
} Words;

/* What a shard without entries has. Never written to. */
static Entry nothing = {{0, 0}, ABSENT};

/* -- one shard */

static inline uint64_t key_at(const Entry *entry)
{
    uint64_t key;
    memcpy(&key, entry->key, sizeof key);
    return key;
}

/* One to one, and in the order of the keys. */
static inline size_t home_of(const Shard *shard, uint64_t key)
{
    return (size_t)((key << SHARD_BITS >> 32) * shard->homes >> 32);
}

/* Where the key is, or would come. */
static inline Entry *seek(const Shard *shard, uint64_t key)
{
    Entry *at = shard->entries + home_of(shard, key);
    while (at->set != ABSENT && key_at(at) < key)
        at++;
    return at;
}

static Entry *entries_new(size_t slots)
{
    size_t size = slots * sizeof(Entry);
    void *new;
    if (size < MIN_MAPPED)
        new = PyMem_Malloc(size);
    else if ((new = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))
             == MAP_FAILED)
        new = NULL;
    return new == NULL ? NULL : memset(new, 0xff, size);
}

static void entries_free(Entry *entries, size_t slots)
{
    if (entries == &nothing)
        return;
    if (slots * sizeof(Entry) < MIN_MAPPED)
        PyMem_Free(entries);
    else
        munmap(entries, slots * sizeof(Entry));
}

/* Whether all entries went in, and one more will. */
static int fill(Shard *to, const Shard *from)
{
    Entry *next = to->entries;
    const Entry *end = to->entries + to->slots - 2, *at = from->entries;
    for (uint32_t left = from->used; left > 0; at++) {
        if (at->set == ABSENT)
            continue;
        Entry *home = to->entries + home_of(to, key_at(at));
        next = home > next ? home : next;
        if (next == end)
            return 0;
        *next++ = *at;
        left--;
    }
    return 1;
}

/* -1 without memory, and then nothing has changed. */
static int resize(Shard *shard, uint64_t homes)
{
    /* Where too many want the last homes, there is room for all behind them. */
    for (uint64_t slots = homes + SPARE; slots < UINT32_MAX; slots += shard->used) {
        Shard new = {entries_new(slots), (uint32_t)homes, (uint32_t)slots, shard->used};
        if (new.entries == NULL)
            return -1;
        if (fill(&new, shard)) {
            entries_free(shard->entries, shard->slots);
            *shard = new;
            return 0;
        }
        entries_free(new.entries, slots);
    }
    return -1;
}

static int grow(Shard *shard)
{
    return resize(shard, (uint64_t)shard->homes + shard->homes / 8 + MIN_HOMES);
}

/* Gives memory back, if there is much to give. */
static void shrink(Shard *shard)
{
    if (shard->homes > 64 && shard->used < shard->homes / 4)
        (void)resize(shard, (uint64_t)shard->used + shard->used / 2 + MIN_HOMES);
}

/* A key that is not there. -1 without memory. */
static int insert(Shard *shard, uint64_t key, uint32_t set)
{
    if ((uint64_t)(shard->used + 1) * 5 > (uint64_t)shard->homes * 4 && grow(shard) < 0)
        return -1;
    for (;;) { /* twice at most */
        Entry *to = seek(shard, key), *end = to;
        while (end->set != ABSENT)
            end++;
        if (end != shard->entries + shard->slots - 1) {
            memmove(to + 1, to, (size_t)(end - to) * sizeof(Entry));
            memcpy(to->key, &key, sizeof key);
            to->set = set;
            shard->used++;
            return 0;
        }
        if (grow(shard) < 0)
            return -1;
    }
}

static void erase(Shard *shard, Entry *entry)
{
    Entry *end = entry + 1;
    while (end->set != ABSENT
           && home_of(shard, key_at(end)) < (size_t)(end - shard->entries))
        end++;
    memmove(entry, entry + 1, (size_t)(end - entry - 1) * sizeof(Entry));
    end[-1].set = ABSENT;
    shard->used--;
}

/* -- the hashes of one call */

static int words_open(Words *words, PyObject *given, Py_ssize_t size)
{
    if (PyObject_GetBuffer(given, &words->view, PyBUF_ND | PyBUF_FORMAT) < 0)
        return -1;
    if (words->view.itemsize == size) {
        words->count = words->view.len / size;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "words of %zd bytes, not %zd", size, words->view.itemsize);
    PyBuffer_Release(&words->view);
    return -1;
}

static inline uint64_t mixed(const Table *table, const Words *words, Py_ssize_t at)
{
    uint64_t key;
    memcpy(&key, (const char *)words->view.buf + at * HASH, sizeof key);
    key *= table->secret;
    return (key ^ key >> 32) * 0x9E3779B97F4A7C15U;
}

static inline Shard *shard_of(const Table *table, uint64_t key)
{
    return (Shard *)&table->shards[key >> (64 - SHARD_BITS)];
}

static inline void prepare(const Table *table, const Words *words, Py_ssize_t at)
{
    uint64_t key = mixed(table, words, at);
    const Shard *shard = shard_of(table, key);
    const Entry *home = shard->entries + home_of(shard, key);
    /* Half of the searches go on into the next line. */
    PREFETCH(home);
    PREFETCH(home + 4);
}

static inline uint32_t set_at(const Table *table, const Words *words, Py_ssize_t at)
{
    uint64_t key = mixed(table, words, at);
    const Entry *entry = seek(shard_of(table, key), key);
    return key_at(entry) == key ? entry->set : ABSENT;
}

/* The last of the hashes from `at` on, in steps of `stride` and before `end`, up to which all have
   `set`, as the first has. */
static Py_ssize_t same_set(const Table *table, const Words *words, Py_ssize_t at, Py_ssize_t end,
                           Py_ssize_t stride, uint32_t set)
{
    for (Py_ssize_t i = 1; i <= AHEAD && at + i * stride < end; i++)
        prepare(table, words, at + i * stride);
    while (at + stride < end && set_at(table, words, at + stride) == set) {
        at += stride;
        if (at + AHEAD * stride < end)
            prepare(table, words, at + AHEAD * stride);
    }
    return at;
}

static int append(PyObject *list, unsigned long value)
{
    PyObject *number = PyLong_FromUnsignedLong(value);
    int done = number == NULL ? -1 : PyList_Append(list, number);
    Py_XDECREF(number);
    return done;
}

/* NULL for one that was not told. */
static const uint64_t *mask_of(const Table *table, unsigned long set)
{
    return set < table->sets ? table->masks + set * table->width : NULL;
}

/* The one that is in the one set and not in the other, or -1 where that are none or many. */
static long one_more(const Table *table, const uint64_t *mask, const uint64_t *other)
{
    long found = -1;
    for (size_t i = 0; mask != NULL && i < table->width; i++) {
        uint64_t left = other == NULL ? mask[i] : mask[i] & ~other[i];
        if (left == 0)
            continue;
        if (found >= 0 || (left & (left - 1)) != 0)
            return -1;
        for (found = (long)i * 64; (left & 0xff) == 0; left >>= 8)
            found += 8;
        for (; (left & 1) == 0; left >>= 1)
            found++;
    }
    return found;
}

static PyObject *ending(const Table *table, PyObject *sets)
{
    Py_ssize_t count = PyList_GET_SIZE(sets);
    PyObject *slots = PyList_New(count);
    for (Py_ssize_t i = count - 1; slots != NULL && i >= 0; i--) {
        /* They were made here, of 32 bits. */
        const uint64_t *mask = mask_of(table, PyLong_AsUnsignedLong(PyList_GET_ITEM(sets, i)));
        const uint64_t *next = i + 1 == count ? NULL : mask_of(
            table, PyLong_AsUnsignedLong(PyList_GET_ITEM(sets, i + 1)));
        PyObject *slot = PyLong_FromLong(one_more(table, mask, next));
        if (slot == NULL)
            Py_CLEAR(slots);
        else
            PyList_SET_ITEM(slots, i, slot);
    }
    return slots;
}

static PyObject *table_runs(PyObject *self, PyObject *given)
{
    const Table *table = (Table *)self;
    Words words;
    Py_ssize_t end = 0, prepared = 0;
    if (words_open(&words, given, HASH) < 0)
        return NULL;
    /* Not a list of tuples: each would be an object more for the collector of garbage. */
    PyObject *ends = PyList_New(0), *sets = PyList_New(0), *slots = NULL, *found = NULL;
    int done = ends == NULL || sets == NULL ? -1 : 0;
    while (done == 0 && end < words.count) {
        for (; end > 0 && prepared < end + FAR_AHEAD && prepared < words.count; prepared++)
            prepare(table, &words, prepared);
        uint32_t set = set_at(table, &words, end);
        if (set == ABSENT)
            break;
        const uint64_t *mask = mask_of(table, set);
        for (size_t i = 0; mask != NULL && i < table->width; i += LINE / sizeof *mask)
            PREFETCH(mask + i);
        Py_ssize_t limit = words.count;
        for (Py_ssize_t stride = STRIDE; stride > 0; stride /= STEP) {
            end = same_set(table, &words, end, limit, stride, set);
            limit = end + stride < limit ? end + stride : limit;
        }
        end++;
        prepared = prepared > end ? prepared : end;
        done = append(ends, (unsigned long)end) < 0 || append(sets, set) < 0 ? -1 : 0;
    }
    if (done == 0 && (slots = ending(table, sets)) != NULL)
        found = PyTuple_Pack(3, ends, sets, slots);
    Py_XDECREF(ends);
    Py_XDECREF(sets);
    Py_XDECREF(slots);
    PyBuffer_Release(&words.view);
    return found;
}

static PyObject *table_run(PyObject *self, PyObject *args)
{
    PyObject *given, *found = NULL;
    Py_ssize_t start;
    Words words;
    if (!PyArg_ParseTuple(args, "On", &given, &start) || words_open(&words, given, HASH) < 0)
        return NULL;
    if (start < 0 || start >= words.count)
        PyErr_SetString(PyExc_IndexError, "a run begins at one of the hashes");
    else {
        const Table *table = (Table *)self;
        Py_ssize_t limit = words.count - start < MAX_RUN ? words.count : start + MAX_RUN;
        uint32_t set = set_at(table, &words, start);
        found = Py_BuildValue("nI", same_set(table, &words, start, limit, 1, set) + 1, set);
    }
    PyBuffer_Release(&words.view);
    return found;
}

/* -- changes */

static int set_from(PyObject *object, void *to)
{
    unsigned long set = PyLong_AsUnsignedLong(object);
    if (set == (unsigned long)-1 && PyErr_Occurred())
        return 0;
    if (set > ABSENT) {
        PyErr_SetString(PyExc_OverflowError, "a set has a number of 32 bits");
        return 0;
    }
    *(uint32_t *)to = (uint32_t)set;
    return 1;
}

/* Whether the set was the old one; -1 without memory. */
static int change_one(Table *table, uint64_t key, uint32_t old, uint32_t new)
{
    Shard *shard = shard_of(table, key);
    Entry *entry = seek(shard, key);
    if ((key_at(entry) == key ? entry->set : ABSENT) != old)
        return 0;
    if (old == ABSENT) {
        if (insert(shard, key, new) < 0)
            return -1;
        table->used++;
    } else if (new == ABSENT) {
        erase(shard, entry);
        shrink(shard);
        table->used--;
    } else
        entry->set = new;
    return 1;
}

static PyObject *table_change(PyObject *self, PyObject *args)
{
    PyObject *given;
    Py_ssize_t start, end, changed = 0;
    uint32_t old, new;
    Words words;
    int done = 0;
    if (!PyArg_ParseTuple(args, "OnnO&O&", &given, &start, &end, set_from, &old, set_from, &new)
        || words_open(&words, given, HASH) < 0)
        return NULL;
    if (start < 0 || end < start || end > words.count) {
        PyErr_SetString(PyExc_IndexError, "a stretch begins and ends within the hashes");
        done = -1;
    }
    for (Py_ssize_t at = start; done >= 0 && old != new && at < end; at++) {
        if (at + AHEAD < end)
            prepare((Table *)self, &words, at + AHEAD);
        done = change_one((Table *)self, mixed((Table *)self, &words, at), old, new);
        if (done < 0)
            PyErr_NoMemory();
        else
            changed += done;
    }
    PyBuffer_Release(&words.view);
    return done < 0 ? NULL : PyLong_FromSsize_t(changed);
}

/* Room for so many sets of so many words each. -1 without memory. */
static int widen(Table *table, size_t sets, size_t width)
{
    size_t new_sets = table->sets ? table->sets : 64, new_width = table->width ? table->width : 1;
    while (new_sets < sets)
        new_sets *= 2;
    while (new_width < width)
        new_width *= 2;
    if (new_sets == table->sets && new_width == table->width)
        return 0;
    if (new_width > (size_t)PY_SSIZE_T_MAX / sizeof(uint64_t) / new_sets)
        return -1;
    uint64_t *masks = PyMem_Calloc(new_sets * new_width, sizeof *masks);
    if (masks == NULL)
        return -1;
    for (size_t i = 0; i < table->sets; i++)
        memcpy(masks + i * new_width, table->masks + i * table->width,
               table->width * sizeof *masks);
    PyMem_Free(table->masks);
    table->masks = masks, table->sets = new_sets, table->width = new_width;
    return 0;
}

static PyObject *table_tell(PyObject *self, PyObject *args)
{
    Table *table = (Table *)self;
    uint32_t set;
    Py_buffer mask;
    if (!PyArg_ParseTuple(args, "O&y*", set_from, &set, &mask))
        return NULL;
    size_t size = (size_t)mask.len;
    int done = widen(table, (size_t)set + 1, (size + 7) / 8);
    if (done == 0) {
        uint64_t *to = table->masks + set * table->width;
        memset(to, 0, table->width * sizeof *to);
        for (size_t i = 0; i < size; i++)
            to[i / 8] |= (uint64_t)((const unsigned char *)mask.buf)[i] << 8 * (i % 8);
    }
    PyBuffer_Release(&mask);
    return done < 0 ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

/* -- all entries of a shard */

/* The shard and the array of two arguments; what `instead` has not, stays. */
static Shard *shard_and_sets(PyObject *self, PyObject *args, Words *instead)
{
    PyObject *given;
    Py_ssize_t number;
    if (!PyArg_ParseTuple(args, "nO", &number, &given))
        return NULL;
    if (number < 0 || number >= SHARDS) {
        PyErr_SetString(PyExc_IndexError, "there is no such shard");
        return NULL;
    }
    return words_open(instead, given, SET) < 0 ? NULL : &((Table *)self)->shards[number];
}

static inline uint32_t set_instead(const Words *instead, uint32_t set)
{
    if (set < (size_t)instead->count)
        memcpy(&set, (const char *)instead->view.buf + (size_t)set * sizeof set, sizeof set);
    return set;
}

static int count_one(PyObject *counts, uint32_t set)
{
    PyObject *key = PyLong_FromUnsignedLong(set), *sum = NULL;
    PyObject *before = key == NULL ? NULL : PyDict_GetItemWithError(counts, key);
    int done = -1;
    if (key != NULL && !PyErr_Occurred()) {
        sum = PyLong_FromSsize_t(before == NULL ? 1 : PyLong_AsSsize_t(before) + 1);
        done = sum == NULL ? -1 : PyDict_SetItem(counts, key, sum);
    }
    Py_XDECREF(sum);
    Py_XDECREF(key);
    return done;
}

static PyObject *table_count(PyObject *self, PyObject *args)
{
    Words instead;
    const Shard *shard = shard_and_sets(self, args, &instead);
    if (shard == NULL)
        return NULL;
    PyObject *counts = PyDict_New();
    const Entry *entry = shard->entries;
    for (uint32_t left = shard->used; counts != NULL && left > 0; entry++) {
        if (entry->set == ABSENT)
            continue;
        if (set_instead(&instead, entry->set) != entry->set && count_one(counts, entry->set) < 0)
            Py_CLEAR(counts);
        left--;
    }
    PyBuffer_Release(&instead.view);
    return counts;
}

static PyObject *table_replace(PyObject *self, PyObject *args)
{
    Words instead;
    Shard *shard = shard_and_sets(self, args, &instead);
    if (shard == NULL)
        return NULL;
    Entry *entry = shard->entries;
    for (uint32_t left = shard->used; left > 0;) {
        if (entry->set == ABSENT) {
            entry++;
            continue;
        }
        left--;
        uint32_t set = set_instead(&instead, entry->set);
        if (set != ABSENT)
            (entry++)->set = set;
        else {
            /* What stood behind it may stand here now. */
            erase(shard, entry);
            ((Table *)self)->used--;
        }
    }
    shrink(shard);
    PyBuffer_Release(&instead.view);
    Py_RETURN_NONE;
}

/* -- the table */

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    static char *keys[] = {"secret", NULL};
    unsigned long long secret;
    if (!PyArg_ParseTupleAndKeywords(args, names, "K", keys, &secret))
        return NULL;
    Table *table = (Table *)type->tp_alloc(type, 0);
    if (table == NULL)
        return NULL;
    /* Odd: each hash has a mixed one of its own. */
    table->secret = (uint64_t)secret | 1;
    for (int i = 0; i < SHARDS; i++)
        table->shards[i].entries = &nothing;
    return (PyObject *)table;
}

static void table_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    for (int i = 0; i < SHARDS; i++)
        entries_free(((Table *)self)->shards[i].entries, ((Table *)self)->shards[i].slots);
    PyMem_Free(((Table *)self)->masks);
    type->tp_free(self);
    Py_DECREF(type);
}

static Py_ssize_t table_length(PyObject *self)
{
    return ((Table *)self)->used;
}

static PyObject *table_sizeof(PyObject *self, PyObject *unused)
{
    size_t size = sizeof(Table)
                  + ((Table *)self)->sets * ((Table *)self)->width * sizeof(uint64_t);
    (void)unused;
    for (int i = 0; i < SHARDS; i++) {
        const Shard *shard = &((Table *)self)->shards[i];
        if (shard->entries != &nothing)
            size += shard->slots * sizeof(Entry);
    }
    return PyLong_FromSize_t(size);
}

static PyMethodDef table_methods[] = {
    {"runs", table_runs, METH_O, "See router/prefix/table.py."},
    {"run", table_run, METH_VARARGS, "See router/prefix/table.py."},
    {"tell", table_tell, METH_VARARGS, "See router/prefix/table.py."},
    {"change", table_change, METH_VARARGS, "See router/prefix/table.py."},
    {"count", table_count, METH_VARARGS, "See router/prefix/table.py."},
    {"replace", table_replace, METH_VARARGS, "See router/prefix/table.py."},
    {"__sizeof__", table_sizeof, METH_NOARGS, "Bytes, all shards included."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_doc, "See router/prefix/table.py."},
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, table_methods},
    {Py_sq_length, table_length},
    {0, NULL},
};

static PyType_Spec table_spec = {
    "router.prefix._table.Table", sizeof(Table), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, table_slots,
};

static int module_exec(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &table_spec, NULL);
    int added = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return added;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_table", .m_size = 0, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__table(void)
{
    return PyModuleDef_Init(&module);
}
