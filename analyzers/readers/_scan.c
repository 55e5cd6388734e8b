/* Scans a slice of a Chrome trace's event array into columns, in one pass over its text.
 *
 * It accepts only what it understands entirely: valid JSON whose complete events have the usual types. For anything else
 * scan() returns None and leaves no trace, and the caller decodes the slice in Python (chrome_events), which is also the
 * reference that the tests compare this with. So a doubt costs time, never a result. Equal texts (names, shapes, threads)
 * are numbered in the order of their first use; the caller gets each new text once.
 *
 * Only the limited API of Python 3.10 is used: one binary serves all later versions.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define DEEPEST 60
#define NONE (-1)
/* So many always fit into 64 bits. */
#define SAFE_DIGITS 19
/* Above it µs as int64 ns overflow, or are not exact as float64, which the reference reads first. */
#define LARGEST_US 9000000000000000

typedef struct {
    const char *at; /* NULL: absent */
    size_t length;
} Span;

/* ---- Buffers that grow ---- */

typedef struct {
    char *data;
    size_t used, room;
} Buffer;

static int grow(Buffer *buffer, size_t length)
{
    size_t room = 2 * buffer->room + length + 4096;
    char *moved = realloc(buffer->data, room);
    if (moved == NULL) {
        return 0;
    }
    buffer->data = moved;
    buffer->room = room;
    return 1;
}

static inline int append(Buffer *buffer, const void *data, size_t length)
{
    if (buffer->room - buffer->used < length && !grow(buffer, length)) {
        return 0;
    }
    memcpy(buffer->data + buffer->used, data, length);
    buffer->used += length;
    return 1;
}

/* ---- Texts, numbered ---- */

typedef struct {
    uint64_t hash;
    size_t at, length;
} Entry;

typedef struct {
    Buffer text, entries;
    int32_t *slots; /* number of an entry + 1; 0: free */
    size_t size;    /* of slots: a power of two, or 0 */
    size_t marked_text, marked_entries;
} Texts;

static size_t count_of(const Texts *texts)
{
    return texts->entries.used / sizeof(Entry);
}

static Entry *entry_of(const Texts *texts, size_t number)
{
    return (Entry *)(void *)texts->entries.data + number;
}

static inline uint64_t mixed(uint64_t hash, const char *at, size_t length)
{
    uint64_t word = 0;
    memcpy(&word, at, length);
    hash = (hash ^ word) * 0xD6E8FEB86659FD93u;
    return hash ^ (hash >> 32);
}

static uint64_t hash_of(const char *at, size_t length)
{
    uint64_t hash = length * 0x9E3779B97F4A7C15u;
    if (length < 8) {
        return mixed(hash, at, length);
    }
    const char *last = at + length - 8;
    for (; at < last; at += 8) {
        hash = mixed(hash, at, 8);
    }
    return mixed(hash, last, 8);
}

/* Enter all texts again, into `size` slots. */
static int rebuild(Texts *texts, size_t size)
{
    int32_t *slots = calloc(size, sizeof *slots);
    if (slots == NULL) {
        return 0;
    }
    for (size_t number = 0; number < count_of(texts); number++) {
        size_t slot = entry_of(texts, number)->hash & (size - 1);
        while (slots[slot]) {
            slot = (slot + 1) & (size - 1);
        }
        slots[slot] = (int32_t)number + 1;
    }
    free(texts->slots);
    texts->slots = slots;
    texts->size = size;
    return 1;
}

/* The number of a text, which may be new; -1 without memory. */
static int32_t number_of(Texts *texts, Span text)
{
    if (2 * count_of(texts) >= texts->size && !rebuild(texts, texts->size ? 2 * texts->size : 256)) {
        return -1;
    }
    uint64_t hash = hash_of(text.at, text.length);
    size_t slot = hash & (texts->size - 1);
    for (; texts->slots[slot]; slot = (slot + 1) & (texts->size - 1)) {
        const Entry *entry = entry_of(texts, (size_t)texts->slots[slot] - 1);
        if (entry->hash == hash && entry->length == text.length &&
            memcmp(texts->text.data + entry->at, text.at, text.length) == 0) {
            return texts->slots[slot] - 1;
        }
    }
    Entry added = {hash, texts->text.used, text.length};
    if (count_of(texts) >= INT32_MAX - 1 || !append(&texts->text, text.at, text.length) ||
        !append(&texts->entries, &added, sizeof added)) {
        return -1;
    }
    texts->slots[slot] = (int32_t)count_of(texts);
    return texts->slots[slot] - 1;
}

static void mark(Texts *texts)
{
    texts->marked_text = texts->text.used;
    texts->marked_entries = texts->entries.used;
}

/* Forget the texts since the mark. */
static int undo(Texts *texts)
{
    if (texts->entries.used == texts->marked_entries) {
        return 1;
    }
    texts->text.used = texts->marked_text;
    texts->entries.used = texts->marked_entries;
    return rebuild(texts, texts->size);
}

static PyObject *new_texts(const Texts *texts)
{
    PyObject *list = PyList_New(0);
    for (size_t number = texts->marked_entries / sizeof(Entry); list != NULL && number < count_of(texts); number++) {
        const Entry *entry = entry_of(texts, number);
        PyObject *text = PyBytes_FromStringAndSize(texts->text.data + entry->at, (Py_ssize_t)entry->length);
        if (text == NULL || PyList_Append(list, text) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(text);
    }
    return list;
}

/* ---- JSON; every function returns where it ended, NULL where the text is not for this scanner ---- */

static inline const char *skip_space(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\t' || *p == '\r')) {
        p++;
    }
    return p;
}

static inline int is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static int is_hex(char c)
{
    return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

static inline int follows(const unsigned char *p, const unsigned char *end, int count)
{
    for (int at = 1; at <= count; at++) {
        if (p + at >= end || (p[at] & 0xC0) != 0x80) {
            return 0;
        }
    }
    return 1;
}

/* After one character of several bytes of UTF-8. */
static const char *skip_utf8(const char *at, const char *limit)
{
    const unsigned char *p = (const unsigned char *)at, *end = (const unsigned char *)limit;
    if (p[0] >= 0xC2 && p[0] <= 0xDF && follows(p, end, 1)) {
        return at + 2;
    }
    if (p[0] >= 0xE0 && p[0] <= 0xEF && follows(p, end, 2) && !(p[0] == 0xE0 && p[1] < 0xA0) &&
        !(p[0] == 0xED && p[1] > 0x9F)) {
        return at + 3;
    }
    if (p[0] >= 0xF0 && p[0] <= 0xF4 && follows(p, end, 3) && !(p[0] == 0xF0 && p[1] < 0x90) &&
        !(p[0] == 0xF4 && p[1] > 0x8F)) {
        return at + 4;
    }
    return NULL;
}

/* After an escape; not those of surrogates, of which a half may be missing. */
static const char *skip_escape(const char *p, const char *end)
{
    if (end - p < 2) {
        return NULL;
    }
    if (p[1] != 'u') {
        return strchr("\"\\/bfnrt", p[1]) != NULL && p[1] ? p + 2 : NULL;
    }
    if (end - p < 6 || !is_hex(p[2]) || !is_hex(p[3]) || !is_hex(p[4]) || !is_hex(p[5])) {
        return NULL;
    }
    int surrogate = (p[2] == 'd' || p[2] == 'D') && !(p[3] >= '0' && p[3] <= '7');
    return surrogate ? NULL : p + 6;
}

/* The closing quote of the string whose content begins at `p`. */
static inline const char *string_end(const char *p, const char *end, int *escaped)
{
    for (;;) {
#if defined(__SSE2__)
        while (end - p >= 16) {
            __m128i block = _mm_loadu_si128((const __m128i *)(const void *)p);
            /* As signed numbers, bytes of UTF-8 are below a space as control characters are. */
            __m128i special = _mm_or_si128(
                _mm_cmplt_epi8(block, _mm_set1_epi8(' ')),
                _mm_or_si128(_mm_cmpeq_epi8(block, _mm_set1_epi8('"')), _mm_cmpeq_epi8(block, _mm_set1_epi8('\\'))));
            int found = _mm_movemask_epi8(special);
            if (found) {
                p += __builtin_ctz((unsigned)found);
                break;
            }
            p += 16;
        }
#endif
        if (p >= end) {
            return NULL;
        }
        if (*p == '"') {
            return p;
        }
        if (*p == '\\') {
            *escaped = 1;
            p = skip_escape(p, end);
        } else if ((unsigned char)*p >= 0x80) {
            p = skip_utf8(p, end);
        } else {
            p = (unsigned char)*p < ' ' ? NULL : p + 1;
        }
        if (p == NULL) {
            return NULL;
        }
    }
}

static const char *skip_number(const char *p, const char *end)
{
    p += p < end && *p == '-';
    const char *digits = p;
    while (p < end && is_digit(*p)) {
        p++;
    }
    if (p == digits || (*digits == '0' && p - digits > 1)) {
        return NULL;
    }
    if (p < end && *p == '.') {
        const char *decimals = ++p;
        while (p < end && is_digit(*p)) {
            p++;
        }
        if (p == decimals) {
            return NULL;
        }
    }
    /* The reference refuses numbers beyond float64. */
    return p < end && (*p == 'e' || *p == 'E') ? NULL : p - digits > 300 ? NULL : p;
}

static const char *skip_value(const char *p, const char *end, int depth);

static const char *skip_word(const char *p, const char *end, const char *word)
{
    size_t length = strlen(word);
    return (size_t)(end - p) >= length && memcmp(p, word, length) == 0 ? p + length : NULL;
}

static const char *skip_container(const char *p, const char *end, int depth)
{
    int escaped = 0;
    int is_object = *p == '{';
    char closing = is_object ? '}' : ']';
    if (depth >= DEEPEST) {
        return NULL;
    }
    p = skip_space(p + 1, end);
    if (p < end && *p == closing) {
        return p + 1;
    }
    for (;;) {
        if (is_object) {
            if (p >= end || *p != '"' || (p = string_end(p + 1, end, &escaped)) == NULL) {
                return NULL;
            }
            p = skip_space(p + 1, end);
            if (p >= end || *p != ':') {
                return NULL;
            }
            p = skip_space(p + 1, end);
        }
        if ((p = skip_value(p, end, depth + 1)) == NULL) {
            return NULL;
        }
        p = skip_space(p, end);
        if (p >= end || (*p != ',' && *p != closing)) {
            return NULL;
        }
        if (*p == closing) {
            return p + 1;
        }
        p = skip_space(p + 1, end);
    }
}

static const char *skip_value(const char *p, const char *end, int depth)
{
    int escaped = 0;
    if (p >= end) {
        return NULL;
    }
    switch (*p) {
    case '"':
        p = string_end(p + 1, end, &escaped);
        return p == NULL ? NULL : p + 1;
    case '{':
    case '[':
        return skip_container(p, end, depth);
    case 't':
        return skip_word(p, end, "true");
    case 'f':
        return skip_word(p, end, "false");
    case 'n':
        return skip_word(p, end, "null");
    default:
        return skip_number(p, end);
    }
}

/* A whole number of 64 bits, signed or not. */
static const char *read_integer(const char *p, const char *end, int64_t *value)
{
    int negative = p < end && *p == '-';
    uint64_t total = 0;
    const char *digits = p += negative;
    while (p < end && is_digit(*p) && p - digits < SAFE_DIGITS) {
        total = 10 * total + (unsigned)(*p++ - '0');
    }
    while (p < end && is_digit(*p)) {
        unsigned digit = (unsigned)(*p - '0');
        if (total > (UINT64_MAX - digit) / 10) {
            return NULL;
        }
        total = 10 * total + digit;
        p++;
    }
    if (p == digits || (*digits == '0' && p - digits > 1) || (negative && total > INT64_MAX) ||
        (p < end && (*p == '.' || *p == 'e' || *p == 'E'))) {
        return NULL;
    }
    /* Ids beyond int64 wrap around, so that equal ones stay equal. */
    *value = (int64_t)(negative ? 0 - total : total);
    return p;
}

/* An id: a whole number, in quotes or not, or null. */
static const char *read_id(const char *p, const char *end, int64_t *value)
{
    if (p < end && *p == 'n') {
        *value = NONE;
        return skip_word(p, end, "null");
    }
    if (p < end && *p == '"') {
        p = read_integer(p + 1, end, value);
        return p != NULL && p < end && *p == '"' ? p + 1 : NULL;
    }
    return read_integer(p, end, value);
}

/* Microseconds with at most three decimals as nanoseconds. */
static const char *read_time(const char *p, const char *end, int64_t *ns)
{
    int64_t us = 0, fraction = 0;
    const char *digits = p;
    while (p < end && is_digit(*p) && p - digits <= 16) {
        us = 10 * us + (*p++ - '0');
    }
    if (p == digits || us > LARGEST_US || (*digits == '0' && p - digits > 1)) {
        return NULL;
    }
    if (p < end && *p == '.') {
        const char *decimals = ++p;
        int64_t unit = 100;
        for (; p < end && is_digit(*p); p++, unit /= 10) {
            if (unit == 0 && *p != '0') {
                return NULL;
            }
            fraction += unit * (*p - '0');
        }
        if (p == decimals || p - decimals > 100) {
            return NULL;
        }
    }
    if (p < end && (is_digit(*p) || *p == 'e' || *p == 'E')) {
        return NULL;
    }
    *ns = 1000 * us + fraction;
    return p;
}

/* ---- Members of objects, of which most are written as in an event before ---- */

#define MEMBERS 24
#define PHASES 8
#define KINDS 32

/* What stood at this place in an earlier event of the slice. Where the same text stands again it is not read again. */
typedef struct {
    Span before; /* from the end of the former value, or the opening brace, to the value */
    Span key;    /* in it */
    Span value;  /* a string or container, or what names a thread: known again without reading it */
} Member;

/* Members beyond the last place share it. */
static inline Member *member_at(Member *members, int place)
{
    return &members[place < MEMBERS ? place : MEMBERS - 1];
}

/* Does the text at `p` begin as the earlier one did, which lies before it in the same slice? */
static inline int is_again(const char *p, const char *end, Span earlier)
{
    if (earlier.length == 0 || (size_t)(end - p) < earlier.length + 16) {
        return 0;
    }
#if defined(__SSE2__)
    for (size_t at = 0; at < earlier.length; at += 16) {
        __m128i now = _mm_loadu_si128((const __m128i *)(const void *)(p + at));
        __m128i then = _mm_loadu_si128((const __m128i *)(const void *)(earlier.at + at));
        unsigned same = (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(now, then));
        size_t left = earlier.length - at;
        unsigned wanted = left < 16 ? (1u << left) - 1 : 0xFFFFu;
        if ((same & wanted) != wanted) {
            return 0;
        }
    }
    return 1;
#else
    return memcmp(p, earlier.at, earlier.length) == 0;
#endif
}

/* ---- Events ---- */

typedef struct {
    char phase;
    int has_start, is_described, escaped_name;
    Span category, name, process, thread, args, shapes, types, inputs;
    int64_t start, duration, external, old_external, correlation, other_correlation, device, stream, step, node;
} Event;

typedef struct {
    PyObject_HEAD
    PyObject *category_of;
    unsigned on_device, described;
    int python, other;
    Texts names, tracks, shapes, types, inputs, categories;
    Buffer codes; /* of `categories`, int8 */
    Buffer category, name, start, duration, track, device, stream, correlation, external, shape, type, input;
    PyObject *others, *told, *steps;
    Py_ssize_t events, rows;
    Member of_event[PHASES][MEMBERS], of_args[KINDS][MEMBERS];
} Scanner;

static int is_key(Span key, const char *name)
{
    return key.length == strlen(name) && memcmp(key.at, name, key.length) == 0;
}

/* The field of an argument with a number, or with JSON text; both NULL where it is not read. */
static void find_field(Event *event, Span key, int64_t **number, Span **text)
{
    *number = NULL;
    *text = NULL;
    switch (key.length) {
    case 6:
        *number = is_key(key, "stream") ? &event->stream : is_key(key, "device") ? &event->device : NULL;
        break;
    case 8:
        *number = is_key(key, "step_num") ? &event->step : NULL;
        break;
    case 10:
        *text = is_key(key, "Input Dims") ? &event->shapes : is_key(key, "Input type") ? &event->types : NULL;
        break;
    case 11:
        *number = is_key(key, "External id")   ? &event->external
                  : is_key(key, "external id") ? &event->old_external
                  : is_key(key, "correlation") ? &event->correlation
                                               : NULL;
        break;
    case 13:
        *number = is_key(key, "graph node id")   ? &event->node
                  : is_key(key, "connection_id") ? &event->other_correlation
                                                 : NULL;
        break;
    case 14:
        *number = is_key(key, "correlation_id") ? &event->other_correlation : NULL;
        break;
    case 15:
        event->is_described |= is_key(key, "Collective name");
        *text = is_key(key, "Concrete Inputs") ? &event->inputs : NULL;
        break;
    case 18:
        event->is_described |= is_key(key, "Process Group Name");
        break;
    default:
        break;
    }
}

/* A key and its colon; the value begins at what is returned. Keys with escapes are left to the reference. */
static inline const char *read_key(const char *p, const char *end, Span *key)
{
    int escaped = 0;
    if (p >= end || *p != '"') {
        return NULL;
    }
    key->at = p + 1;
    p = string_end(p + 1, end, &escaped);
    if (p == NULL || escaped) {
        return NULL;
    }
    key->length = (size_t)(p - key->at);
    p = skip_space(p + 1, end);
    return p < end && *p == ':' ? skip_space(p + 1, end) : NULL;
}

/* The next member's value, after the end of the one before it or the opening brace; `*closed` after the closing one. */
static inline const char *next_value(const char *p, const char *end, Member *member, int first, Span *key, int *closed)
{
    if (is_again(p, end, member->before)) {
        *key = member->key;
        return p + member->before.length;
    }
    const char *start = p;
    p = skip_space(p, end);
    if (p < end && *p == '}') {
        *closed = 1;
        return p + 1;
    }
    if (!first) {
        if (p >= end || *p != ',') {
            return NULL;
        }
        p = skip_space(p + 1, end);
    }
    p = read_key(p, end, key);
    if (p != NULL) {
        *member = (Member){.before = {start, (size_t)(p - start)}, .key = *key};
    }
    return p;
}

/* A value as it stands; where it stood there before, `text` is where it first did. Numbers could go on, and words are
 * short, so that only strings, arrays and objects are known again. */
static inline const char *read_known(const char *p, const char *end, Member *member, int depth, Span *text)
{
    if (is_again(p, end, member->value)) {
        *text = member->value;
        return p + text->length;
    }
    text->at = p;
    p = skip_value(p, end, depth);
    text->length = p == NULL ? 0 : (size_t)(p - text->at);
    int closed = p != NULL && (p[-1] == '"' || p[-1] == ']' || p[-1] == '}');
    member->value = closed ? *text : (Span){NULL, 0};
    return p;
}

/* Arguments of events of one category mostly have the same members, in one order. */
static Member *members_of(Member (*of_args)[MEMBERS], Span category)
{
    return of_args[category.length > 2 ? (category.length + (unsigned char)category.at[1]) % KINDS : 0];
}

static const char *read_args(const char *p, const char *end, Event *event, Member *members)
{
    int closed = 0;
    if (p >= end || *p != '{') {
        return NULL;
    }
    event->args.at = p++;
    for (int place = 0;; place++) {
        Span key, *text;
        int64_t *number;
        Member *member = member_at(members, place);
        p = next_value(p, end, member, place == 0, &key, &closed);
        if (p == NULL || closed) {
            break;
        }
        find_field(event, key, &number, &text);
        Span unread;
        p = number != NULL ? read_id(p, end, number) : read_known(p, end, member, 2, text != NULL ? text : &unread);
        if (p == NULL) {
            break;
        }
    }
    event->args.length = p == NULL ? 0 : (size_t)(p - event->args.at);
    return p;
}

static const char *read_string(const char *p, const char *end, Span *text, int *escaped)
{
    if (p >= end || *p != '"') {
        return NULL;
    }
    text->at = p;
    p = string_end(p + 1, end, escaped);
    if (p == NULL) {
        return NULL;
    }
    text->length = (size_t)(p + 1 - text->at);
    return p + 1;
}

/* The id of a process or thread: a string, or a whole number. */
static const char *read_track(const char *p, const char *end, Span *text, Member *member)
{
    int64_t ignored;
    int escaped = 0;
    if (is_again(p, end, member->value) && (p[member->value.length] == ',' || p[member->value.length] == '}')) {
        *text = member->value;
        return p + text->length;
    }
    if (p < end && *p == '"') {
        return read_string(p, end, text, &escaped);
    }
    text->at = p;
    p = read_integer(p, end, &ignored);
    text->length = p == NULL ? 0 : (size_t)(p - text->at);
    member->value = *text;
    return p != NULL && is_key(*text, "-0") ? NULL : p;
}

static const char *read_field(const char *p, const char *end, Span key, Event *event, Member *member,
                              Member (*of_args)[MEMBERS])
{
    switch (key.length) {
    case 2:
        if (is_key(key, "ph")) {
            if (end - p < 3 || p[0] != '"' || p[2] != '"' || (unsigned char)p[1] >= 0x80) {
                return NULL;
            }
            event->phase = p[1];
            return p + 3;
        }
        if (is_key(key, "ts")) {
            event->has_start = 1;
            return read_time(p, end, &event->start);
        }
        break;
    case 3:
        if (is_key(key, "dur")) {
            return read_time(p, end, &event->duration);
        }
        if (is_key(key, "cat")) {
            return p < end && *p == '"' ? read_known(p, end, member, 1, &event->category) : NULL;
        }
        if (is_key(key, "pid")) {
            return read_track(p, end, &event->process, member);
        }
        if (is_key(key, "tid")) {
            return read_track(p, end, &event->thread, member);
        }
        break;
    case 4:
        if (is_key(key, "name")) {
            return read_string(p, end, &event->name, &event->escaped_name);
        }
        if (is_key(key, "args")) {
            /* Of a key that is there twice the last one counts. */
            return event->args.at == NULL ? read_args(p, end, event, members_of(of_args, event->category)) : NULL;
        }
        break;
    default:
        break;
    }
    return skip_value(p, end, 1);
}

static const char *read_event(Scanner *self, const char *p, const char *end, Event *event)
{
    int closed = 0;
    if (p >= end || *p != '{') {
        return NULL;
    }
    const Span absent = {NULL, 0};
    event->phase = 0;
    event->has_start = event->is_described = event->escaped_name = 0;
    event->category = event->name = event->process = event->thread = event->args = absent;
    event->shapes = event->types = event->inputs = absent;
    event->start = event->duration = 0;
    event->external = event->old_external = event->correlation = event->other_correlation = NONE;
    event->device = event->stream = event->step = event->node = NONE;
    p++;
    for (int place = 0; p != NULL; place++) {
        Span key;
        Member *member = member_at(self->of_event[event->phase % PHASES], place);
        p = next_value(p, end, member, place == 0, &key, &closed);
        if (closed) {
            break;
        }
        p = p == NULL ? NULL : read_field(p, end, key, event, member, self->of_args);
    }
    return p;
}

/* ---- Columns ---- */

enum outcome { TAKEN, DOUBTFUL, FAILED };

static const Span EMPTY_STRING = {"\"\"", 2};

/* The code of an event's category, known or asked for; -1 with an exception set. */
static int code_of(Scanner *self, Span category)
{
    int32_t number = number_of(&self->categories, category.at ? category : EMPTY_STRING);
    if (number < 0) {
        PyErr_NoMemory();
        return -1;
    }
    if ((size_t)number < self->codes.used) {
        return self->codes.data[number];
    }
    const Entry *entry = entry_of(&self->categories, (size_t)number);
    PyObject *code = PyObject_CallFunction(self->category_of, "y#", self->categories.text.data + entry->at,
                                           (Py_ssize_t)entry->length);
    long value = code == NULL ? -1 : PyLong_AsLong(code);
    int8_t stored = (int8_t)value;
    Py_XDECREF(code);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (value < 0 || value > 31) {
        PyErr_SetString(PyExc_ValueError, "a category's code must be from 0 to 31");
        return -1;
    }
    if (!append(&self->codes, &stored, 1)) {
        PyErr_NoMemory();
        return -1;
    }
    return stored;
}

static int32_t track_of(Scanner *self, const Event *event)
{
    char pair[512];
    Span process = event->process.at ? event->process : EMPTY_STRING;
    Span thread = event->thread.at ? event->thread : EMPTY_STRING;
    if (process.length + thread.length + 1 > sizeof pair) {
        return -2;
    }
    memcpy(pair, process.at, process.length);
    pair[process.length] = ',';
    memcpy(pair + process.length + 1, thread.at, thread.length);
    Span text = {pair, process.length + thread.length + 1};
    return number_of(&self->tracks, text);
}

static int add_text(PyObject *list, Span text)
{
    PyObject *bytes = PyBytes_FromStringAndSize(text.at, (Py_ssize_t)text.length);
    int added = bytes != NULL && PyList_Append(list, bytes) == 0;
    Py_XDECREF(bytes);
    return added;
}

/* (row, value) */
static int add_pair(PyObject *list, Py_ssize_t row, PyObject *value)
{
    PyObject *pair = value == NULL ? NULL : Py_BuildValue("(nO)", row, value);
    int added = pair != NULL && PyList_Append(list, pair) == 0;
    Py_XDECREF(pair);
    Py_XDECREF(value);
    return added;
}

/* The number of a text among `texts`, NONE without one, -2 without memory. */
static int32_t number_or_none(Texts *texts, Span text, int wanted)
{
    if (!wanted || text.at == NULL) {
        return NONE;
    }
    int32_t number = number_of(texts, text);
    return number < 0 ? -2 : number;
}

static enum outcome add_complete(Scanner *self, const Event *event)
{
    if (!event->has_start) {
        return DOUBTFUL;
    }
    int code = code_of(self, event->category);
    if (code < 0) {
        return FAILED;
    }
    int8_t category = (int8_t)code;
    int described = (int)(self->described >> code) & 1, on_device = (int)(self->on_device >> code) & 1;
    int32_t track = track_of(self, event);
    int32_t name = number_of(&self->names, event->name.at ? event->name : EMPTY_STRING);
    int32_t shape = number_or_none(&self->shapes, event->shapes, described);
    int32_t type = number_or_none(&self->types, event->types, described);
    int32_t input = number_or_none(&self->inputs, event->inputs, described);
    if (track == -2) {
        return DOUBTFUL;
    }
    int64_t device = on_device ? event->device : NONE, stream = on_device ? event->stream : NONE;
    int64_t external = event->external == NONE ? event->old_external : event->external;
    int64_t correlation = event->correlation == NONE ? event->other_correlation : event->correlation;
    if (code == self->python) {
        external = NONE;
    }
    int stored = track >= 0 && name >= 0 && shape != -2 && type != -2 && input != -2 &&
                 append(&self->category, &category, sizeof category) && append(&self->name, &name, sizeof name) &&
                 append(&self->start, &event->start, sizeof event->start) &&
                 append(&self->duration, &event->duration, sizeof event->duration) &&
                 append(&self->track, &track, sizeof track) && append(&self->device, &device, sizeof device) &&
                 append(&self->stream, &stream, sizeof stream) &&
                 append(&self->correlation, &correlation, sizeof correlation) &&
                 append(&self->external, &external, sizeof external) && append(&self->shape, &shape, sizeof shape) &&
                 append(&self->type, &type, sizeof type) && append(&self->input, &input, sizeof input);
    if (!stored) {
        PyErr_NoMemory();
        return FAILED;
    }
    if (code == self->other && event->step >= 0 &&
        !add_pair(self->steps, self->rows, PyLong_FromLongLong(event->step))) {
        return FAILED;
    }
    if (described && (event->is_described || (event->node != NONE && event->node != 0)) &&
        !add_pair(self->told, self->rows,
                  PyBytes_FromStringAndSize(event->args.at, (Py_ssize_t)event->args.length))) {
        return FAILED;
    }
    self->rows++;
    return TAKEN;
}

static enum outcome add_event(Scanner *self, const Event *event, Span text)
{
    self->events++;
    switch (event->phase) {
    case 'X':
        return add_complete(self, event);
    case 's': case 't': case 'f': case 'I': case 'R': case 'C': case 'P': case 'v': case 'V': case 'c': case '(':
    case ')': case ',':
        return TAKEN; /* not read: arrows, counters, samples */
    case 'i':
        if (event->escaped_name) {
            return DOUBTFUL;
        }
        return !is_key(event->name, "\"[memory]\"") || add_text(self->others, text) ? TAKEN : FAILED;
    case 'M': case 'b': case 'n': case 'e': case 'S': case 'T': case 'p': case 'F': case 'N': case 'O': case 'D':
        return add_text(self->others, text) ? TAKEN : FAILED;
    default:
        return DOUBTFUL;
    }
}

static enum outcome scan_array(Scanner *self, const char *p, const char *end, const char **past)
{
    Event event;
    if (p >= end || *p != '[') {
        return DOUBTFUL;
    }
    p = skip_space(p + 1, end);
    if (p < end && *p == ']') {
        *past = p + 1;
        return TAKEN;
    }
    for (;;) {
        Span text = {p, 0};
        if ((p = read_event(self, p, end, &event)) == NULL) {
            return DOUBTFUL;
        }
        text.length = (size_t)(p - text.at);
        enum outcome outcome = add_event(self, &event, text);
        if (outcome != TAKEN) {
            return outcome;
        }
        p = skip_space(p, end);
        if (p >= end || (*p != ',' && *p != ']')) {
            return DOUBTFUL;
        }
        if (*p == ']') {
            *past = p + 1;
            return TAKEN;
        }
        p = skip_space(p + 1, end);
    }
}

/* ---- The Python type ---- */

#define TEXTS(self) {&(self)->names, &(self)->tracks, &(self)->shapes, &(self)->types, &(self)->inputs}
#define TEXT_COUNT 5
#define COLUMNS(self)                                                                                             \
    {&(self)->category, &(self)->name, &(self)->start, &(self)->duration, &(self)->track, &(self)->device,        \
     &(self)->stream, &(self)->correlation, &(self)->external, &(self)->shape, &(self)->type, &(self)->input}
#define COLUMN_COUNT 12

static int begin_slice(Scanner *self)
{
    Texts *texts[] = TEXTS(self);
    Buffer *columns[] = COLUMNS(self);
    for (int at = 0; at < TEXT_COUNT; at++) {
        mark(texts[at]);
    }
    for (int at = 0; at < COLUMN_COUNT; at++) {
        columns[at]->used = 0;
    }
    self->events = self->rows = 0;
    memset(self->of_event, 0, sizeof self->of_event);
    memset(self->of_args, 0, sizeof self->of_args);
    PyObject **lists[] = {&self->others, &self->told, &self->steps};
    for (int at = 0; at < 3; at++) {
        PyObject *before = *lists[at];
        *lists[at] = PyList_New(0);
        Py_XDECREF(before);
        if (*lists[at] == NULL) {
            return 0;
        }
    }
    return 1;
}

static PyObject *scanner_undo(PyObject *object, PyObject *unused)
{
    (void)unused;
    Scanner *self = (Scanner *)object;
    Texts *texts[] = TEXTS(self);
    for (int at = 0; at < TEXT_COUNT; at++) {
        if (!undo(texts[at])) {
            return PyErr_NoMemory();
        }
    }
    Py_RETURN_NONE;
}

/* (consumed, closed, events, columns, new texts, others, told, steps) */
static PyObject *scanned(Scanner *self, Py_ssize_t consumed, int closed)
{
    Texts *texts[] = TEXTS(self);
    Buffer *columns[] = COLUMNS(self);
    PyObject *added = PyTuple_New(TEXT_COUNT), *arrays = PyTuple_New(COLUMN_COUNT), *result = NULL;
    int whole = added != NULL && arrays != NULL;
    for (int at = 0; whole && at < TEXT_COUNT; at++) {
        PyObject *list = new_texts(texts[at]);
        whole = list != NULL && PyTuple_SetItem(added, at, list) == 0;
    }
    for (int at = 0; whole && at < COLUMN_COUNT; at++) {
        PyObject *array = PyByteArray_FromStringAndSize(columns[at]->data, (Py_ssize_t)columns[at]->used);
        whole = array != NULL && PyTuple_SetItem(arrays, at, array) == 0;
    }
    if (whole) {
        result = Py_BuildValue("(nOnOOOOO)", consumed, closed ? Py_True : Py_False, self->events, arrays, added,
                               self->others, self->told, self->steps);
    }
    Py_XDECREF(added);
    Py_XDECREF(arrays);
    return result;
}

static PyObject *scanner_scan(PyObject *object, PyObject *arguments)
{
    Scanner *self = (Scanner *)object;
    PyObject *text;
    Py_ssize_t start, stop;
    int last;
    if (!PyArg_ParseTuple(arguments, "Onnp", &text, &start, &stop, &last)) {
        return NULL;
    }
    if (!PyByteArray_Check(text) || start < 0 || start > stop || stop > PyByteArray_Size(text)) {
        PyErr_SetString(PyExc_ValueError, "scan() takes a bytearray and indices in it");
        return NULL;
    }
    if (!begin_slice(self)) {
        return NULL;
    }
    const char *data = PyByteArray_AsString(text), *past = NULL, *end = data + stop;
    enum outcome outcome = scan_array(self, data + start, end, &past);
    if (outcome == TAKEN) {
        const char *rest = skip_space(past, end);
        return scanned(self, (rest == end ? end : past) - (data + start), rest == end ? last : 1);
    }
    if (outcome == FAILED) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        Py_XDECREF(scanner_undo(object, NULL));
        PyErr_Restore(type, value, traceback);
        return NULL;
    }
    return scanner_undo(object, NULL);
}

static int scanner_init(PyObject *object, PyObject *arguments, PyObject *keywords)
{
    (void)keywords;
    Scanner *self = (Scanner *)object;
    PyObject *category_of;
    if (!PyArg_ParseTuple(arguments, "OIIii", &category_of, &self->on_device, &self->described, &self->python,
                          &self->other)) {
        return -1;
    }
    PyObject *before = self->category_of;
    Py_INCREF(category_of);
    self->category_of = category_of;
    Py_XDECREF(before);
    return 0;
}

static void scanner_dealloc(PyObject *object)
{
    Scanner *self = (Scanner *)object;
    Texts *texts[] = TEXTS(self);
    Buffer *columns[] = COLUMNS(self);
    for (int at = 0; at < TEXT_COUNT + 1; at++) {
        Texts *each = at < TEXT_COUNT ? texts[at] : &self->categories;
        free(each->text.data);
        free(each->entries.data);
        free(each->slots);
    }
    for (int at = 0; at < COLUMN_COUNT; at++) {
        free(columns[at]->data);
    }
    free(self->codes.data);
    Py_XDECREF(self->category_of);
    Py_XDECREF(self->others);
    Py_XDECREF(self->told);
    Py_XDECREF(self->steps);
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef scanner_methods[] = {
    {"scan", scanner_scan, METH_VARARGS, "Scan data[start:stop], an array of events. None: decode it in Python."},
    {"undo", scanner_undo, METH_NOARGS, "Forget the texts that the last scan found."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot scanner_slots[] = {
    {Py_tp_doc, "Scans slices of one trace; Scanner(category_of, on_device, described, python, other)."},
    {Py_tp_init, scanner_init},
    {Py_tp_dealloc, scanner_dealloc},
    {Py_tp_methods, scanner_methods},
    {0, NULL},
};

static PyType_Spec scanner_spec = {
    "perfscope.analyzers.readers._scan.Scanner", sizeof(Scanner), 0, Py_TPFLAGS_DEFAULT, scanner_slots};

static int module_exec(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&scanner_spec);
    int added = type == NULL ? -1 : PyModule_AddObject(module, "Scanner", type);
    if (added < 0) {
        Py_XDECREF(type);
    }
    return added;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_scan", "Scans Chrome traces into columns.", 0, NULL, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__scan(void)
{
    return PyModuleDef_Init(&module_definition);
}
