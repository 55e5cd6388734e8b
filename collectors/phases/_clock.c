/* Times the phases of training steps, and stores steps after which there is nothing else to do.
 *
 * What runs here runs several times in every step of a training, when other work has the core's caches: the fewer
 * instructions, the fewer of them have to be fetched again. The same in Python (PythonClock of clock.py, and the
 * functions that StepPhases and the collector put around torch's) is the reference that the tests compare this with.
 * It takes over wherever a call is not a plain one: Gate and PassingSteps then answer False and have changed nothing.
 *
 * Only the limited API of Python 3.10 is used: one binary serves all later versions. The GIL protects all state.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#define MOST_PLACES 64
/* Durations of steps that are kept for whoever asks what is usual. */
#define RECENT 64
#define NO_TASK (-1)

/* Times may be anything in tests: without the undefined overflow of signed integers. */
static int64_t sum(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a + (uint64_t)b);
}

static int64_t difference(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a - (uint64_t)b);
}

/* ---- The clock ---- */

typedef struct {
    int phase, stage; /* which, and the stage that its time counts for */
} Phase;

typedef struct {
    PyObject_HEAD
    int64_t times[MOST_PLACES];
    long long since, reducing, phases, waits, began;
    unsigned long thread;
    Phase *open; /* phases under way, innermost last */
    Py_ssize_t depth, room;
    int stages, places, evaluation, backward, first_core, outside;
    PyObject *now;       /* NULL: CLOCK_MONOTONIC */
    PyObject *evaluates; /* evaluates(module): does a forward that begins now count as an evaluation? */
    PyObject *called, *core;
} Clock;

static PyTypeObject *clock_type;

static int is_set(PyObject *object)
{
    return object != NULL && object != Py_None;
}

/* The time in ns; 0 with an exception set where that fails. */
static int look(Clock *self, int64_t *ns)
{
    if (self->now == NULL) {
#ifdef CLOCK_MONOTONIC
        struct timespec time;
        if (clock_gettime(CLOCK_MONOTONIC, &time) == 0) {
            *ns = (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
            return 1;
        }
#endif
        PyErr_SetString(PyExc_OSError, "there is no monotonic clock");
        return 0;
    }
    PyObject *found = PyObject_CallNoArgs(self->now);
    if (found == NULL) {
        return 0;
    }
    *ns = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return !(*ns == -1 && PyErr_Occurred());
}

/* The stage that time counts for now. */
static int stage_now(const Clock *self)
{
    return self->depth > 0 ? self->open[self->depth - 1].stage : self->outside;
}

/* What the thread waited for a core since it was last asked about, ns. */
static int core_since(Clock *self, int64_t *ns)
{
    PyObject *core = self->core;
    Py_INCREF(core);
    PyObject *waited = PyObject_CallMethod(core, "since", NULL);
    Py_DECREF(core);
    if (waited == NULL) {
        return 0;
    }
    *ns = PyLong_AsLongLong(waited);
    Py_DECREF(waited);
    return !(*ns == -1 && PyErr_Occurred());
}

static int ask_core(Clock *self)
{
    int64_t waited;
    if (!is_set(self->core)) {
        return 1;
    }
    if (!core_since(self, &waited)) {
        return 0;
    }
    if (!self->reducing) {
        int64_t *time = &self->times[self->first_core + stage_now(self)];
        *time = sum(*time, waited);
    }
    return 1;
}

static int begin_phase(Clock *self, int phase, int stage)
{
    int64_t now;
    if (!look(self, &now)) {
        return 0;
    }
    if (self->depth == self->room) {
        Py_ssize_t room = 2 * self->room + 8;
        Phase *moved = PyMem_Realloc(self->open, (size_t)room * sizeof *moved);
        if (moved == NULL) {
            PyErr_NoMemory();
            return 0;
        }
        self->open = moved;
        self->room = room;
    }
    if (self->depth > 0) {
        int64_t *time = &self->times[self->open[self->depth - 1].stage];
        *time = sum(*time, difference(now, self->since));
    }
    self->open[self->depth++] = (Phase){phase, stage};
    self->since = now;
    return 1;
}

static int end_phase(Clock *self, int phase)
{
    int64_t now;
    if (!look(self, &now)) {
        return 0;
    }
    if (self->depth == 0) {
        return 1;
    }
    Py_ssize_t at = self->depth - 1;
    int64_t *time = &self->times[self->open[at].stage];
    *time = sum(*time, difference(now, self->since));
    self->phases++;
    while (at > 0 && self->open[at].phase != phase) {
        at--;
    }
    int ended = self->open[at].phase;
    self->depth = at;
    self->since = now;
    if (self->reducing && phase == self->backward && ended == phase) {
        time = &self->times[self->stages + self->backward];
        *time = sum(*time, difference(now, self->reducing));
        self->waits++;
        self->reducing = 0;
    }
    return 1;
}

static void clear(Clock *self)
{
    memset(self->times, 0, sizeof self->times);
    self->depth = 0;
    self->reducing = 0;
}

/* A phase given by the caller; -1 with an exception set where there is no such stage. */
static int phase_of(const Clock *self, PyObject *object)
{
    long phase = PyLong_AsLong(object);
    if (phase == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (phase < 0 || phase >= self->stages) {
        PyErr_SetString(PyExc_ValueError, "there is no such phase");
        return -1;
    }
    return (int)phase;
}

static PyObject *clock_begin(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Clock *self = (Clock *)object;
    if (count < 1 || count > 2) {
        PyErr_SetString(PyExc_TypeError, "begin() takes a phase and perhaps a module");
        return NULL;
    }
    int phase = phase_of(self, arguments[0]), stage = phase;
    if (phase < 0) {
        return NULL;
    }
    if (PyThread_get_thread_ident() != self->thread) {
        Py_RETURN_FALSE;
    }
    if (count == 2 && arguments[1] != Py_None) {
        PyObject *module = arguments[1];
        if (is_set(self->called)) {
            PyObject *identity = PyLong_FromVoidPtr(module);
            int added = identity == NULL ? -1 : PySet_Add(self->called, identity);
            Py_XDECREF(identity);
            if (added < 0) {
                return NULL;
            }
        }
        PyObject *evaluates = PyObject_CallFunctionObjArgs(self->evaluates, module, NULL);
        int is_true = evaluates == NULL ? -1 : PyObject_IsTrue(evaluates);
        Py_XDECREF(evaluates);
        if (is_true < 0) {
            return NULL;
        }
        stage = is_true ? self->evaluation : phase;
    }
    if (!ask_core(self) || !begin_phase(self, phase, stage)) {
        return NULL;
    }
    Py_RETURN_TRUE;
}

static PyObject *clock_end(PyObject *object, PyObject *number)
{
    Clock *self = (Clock *)object;
    int phase = phase_of(self, number);
    if (phase < 0 || (self->depth > 0 && !(ask_core(self) && end_phase(self, phase)))) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *clock_waited(PyObject *object, PyObject *time)
{
    Clock *self = (Clock *)object;
    int64_t unused, ns = PyLong_AsLongLong(time);
    if (ns == -1 && PyErr_Occurred()) {
        return NULL;
    }
    self->waits++;
    int64_t *place = &self->times[self->stages + stage_now(self)];
    *place = sum(*place, ns);
    /* What waits for ranks anyhow loses nothing by it. */
    if (is_set(self->core) && !core_since(self, &unused)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *clock_ask_core(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (!ask_core((Clock *)object)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* times[first:last] as a list */
static PyObject *listed(const Clock *self, int first, int last)
{
    PyObject *list = PyList_New(last - first);
    for (int at = first; list != NULL && at < last; at++) {
        PyObject *time = PyLong_FromLongLong(self->times[at]);
        if (time == NULL || PyList_SetItem(list, at - first, time) < 0) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

static PyObject *clock_take(PyObject *object, PyObject *unused)
{
    (void)unused;
    Clock *self = (Clock *)object;
    PyObject *stages = listed(self, 0, self->stages), *waits = listed(self, self->stages, self->places);
    PyObject *both = stages != NULL && waits != NULL ? PyTuple_Pack(2, stages, waits) : NULL;
    Py_XDECREF(stages);
    Py_XDECREF(waits);
    if (both != NULL) {
        clear(self);
    }
    return both;
}

static PyObject *clock_clear(PyObject *object, PyObject *unused)
{
    (void)unused;
    clear((Clock *)object);
    Py_RETURN_NONE;
}

static PyObject *clock_set_wait(PyObject *object, PyObject *arguments)
{
    Clock *self = (Clock *)object;
    int place;
    long long ns;
    if (!PyArg_ParseTuple(arguments, "iL", &place, &ns)) {
        return NULL;
    }
    if (place < 0 || place >= self->places - self->stages) {
        PyErr_SetString(PyExc_ValueError, "there is no such wait");
        return NULL;
    }
    self->times[self->stages + place] = ns;
    Py_RETURN_NONE;
}

/* The times, then what tells which step it was. */
static PyObject *row_of(const Clock *self, int64_t number, int64_t began, int64_t duration, int disturbed)
{
    int64_t row[MOST_PLACES + 4];
    const int64_t head[4] = {number, began, duration, disturbed};
    memcpy(row, self->times, (size_t)self->places * sizeof *row);
    memcpy(row + self->places, head, sizeof head);
    return PyBytes_FromStringAndSize((const char *)row, (Py_ssize_t)((size_t)(self->places + 4) * sizeof *row));
}

static PyObject *clock_row(PyObject *object, PyObject *arguments)
{
    long long number, began, duration;
    int disturbed;
    if (!PyArg_ParseTuple(arguments, "LLLp", &number, &began, &duration, &disturbed)) {
        return NULL;
    }
    return row_of((Clock *)object, number, began, duration, disturbed);
}

static int clock_init(PyObject *object, PyObject *arguments, PyObject *keywords)
{
    Clock *self = (Clock *)object;
    PyObject *evaluates, *now;
    int stages, waits, evaluation, backward, first_core, outside;
    if (keywords != NULL && PyDict_Size(keywords) > 0) {
        PyErr_SetString(PyExc_TypeError, "Clock() takes no keywords");
        return -1;
    }
    if (!PyArg_ParseTuple(arguments, "OO(iiiiii)", &evaluates, &now, &stages, &waits, &evaluation, &backward,
                          &first_core, &outside)) {
        return -1;
    }
    int within = stages > 0 && waits > 0 && stages + waits <= MOST_PLACES && evaluation >= 0 && evaluation < stages &&
                 backward >= 0 && backward < stages && outside >= stages && first_core >= 0 &&
                 stages + outside < stages + waits && first_core + outside < stages + waits;
    if (self->stages != 0 || !within) {
        PyErr_SetString(PyExc_ValueError, "Clock() cannot count so many stages and waits");
        return -1;
    }
    self->stages = stages;
    self->places = stages + waits;
    self->evaluation = evaluation;
    self->backward = backward;
    self->first_core = first_core;
    self->outside = outside;
    self->thread = PyThread_get_thread_ident();
    Py_INCREF(evaluates);
    self->evaluates = evaluates;
    if (now != Py_None) {
        Py_INCREF(now);
        self->now = now;
    }
    return 0;
}

#define VISIT_TYPE(object) Py_VISIT(Py_TYPE(object))

static int clock_traverse(PyObject *object, visitproc visit, void *arg)
{
    Clock *self = (Clock *)object;
    VISIT_TYPE(object);
    Py_VISIT(self->now);
    Py_VISIT(self->evaluates);
    Py_VISIT(self->called);
    Py_VISIT(self->core);
    return 0;
}

/* `evaluates` and `now` are needed as long as anything can call: they go with the object. */
static int clock_drop(PyObject *object)
{
    Clock *self = (Clock *)object;
    Py_CLEAR(self->called);
    Py_CLEAR(self->core);
    return 0;
}

static void release(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc free_object = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_object(object);
    Py_DECREF(type);
}

static void clock_dealloc(PyObject *object)
{
    Clock *self = (Clock *)object;
    PyObject_GC_UnTrack(object);
    (void)clock_drop(object);
    Py_CLEAR(self->evaluates);
    Py_CLEAR(self->now);
    PyMem_Free(self->open);
    self->open = NULL;
    release(object);
}

static PyMethodDef clock_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))clock_begin, METH_FASTCALL, "A phase begins."},
    {"end", clock_end, METH_O, "It has ended."},
    {"waited", clock_waited, METH_O, "The phase under way waited so long for other ranks."},
    {"ask_core", clock_ask_core, METH_NOARGS, "Count what the thread waited for a core."},
    {"take", clock_take, METH_NOARGS, "The times since the last call."},
    {"clear", clock_clear, METH_NOARGS, "Begin anew."},
    {"set_wait", clock_set_wait, METH_VARARGS, "Set one of the waits."},
    {"row", clock_row, METH_VARARGS, "The step as it is stored."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef clock_members[] = {
    {"since", T_LONGLONG, offsetof(Clock, since), 0, NULL},
    {"reducing", T_LONGLONG, offsetof(Clock, reducing), 0, NULL},
    {"phases", T_LONGLONG, offsetof(Clock, phases), 0, NULL},
    {"waits", T_LONGLONG, offsetof(Clock, waits), 0, NULL},
    {"began", T_LONGLONG, offsetof(Clock, began), 0, NULL},
    {"called", T_OBJECT, offsetof(Clock, called), 0, NULL},
    {"core", T_OBJECT, offsetof(Clock, core), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot clock_slots[] = {
    {Py_tp_doc, "Clock(evaluates, now, (stages, waits, evaluation, backward, first_core, outside))"},
    {Py_tp_init, clock_init},
    {Py_tp_traverse, clock_traverse},
    {Py_tp_clear, clock_drop},
    {Py_tp_dealloc, clock_dealloc},
    {Py_tp_methods, clock_methods},
    {Py_tp_members, clock_members},
    {0, NULL},
};

static PyType_Spec clock_spec = {
    "perfscope.collectors.phases._clock.Clock", sizeof(Clock), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, clock_slots};

/* Give `place` another object, or none. */
static void hold(PyObject **place, PyObject *object)
{
    PyObject *before = *place;
    Py_XINCREF(object);
    *place = object;
    Py_XDECREF(before);
}

/* May the clock be told of a phase here and now, without any call of Python's? */
static int is_plain(const Clock *clock)
{
    return clock != NULL && clock->now == NULL && !is_set(clock->core) && clock->thread == PyThread_get_thread_ident();
}

/* For a function that answers False rather than fail: its caller then does the same in Python, and reports a fault. */
static PyObject *not_plain(void)
{
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) {
            return NULL; /* KeyboardInterrupt */
        }
        PyErr_Clear();
    }
    Py_RETURN_FALSE;
}

/* Does a weak reference, or anything else that is called without arguments, lead to this object? 0 where it does not,
 * or with an exception set. */
static int leads_to(PyObject *reference, const PyObject *object)
{
    Py_INCREF(reference);
    PyObject *found = PyObject_CallNoArgs(reference);
    Py_DECREF(reference);
    int same = found == object;
    Py_XDECREF(found);
    return same;
}

/* ---- The way from one phase's wrappers to the clock ---- */

typedef struct {
    PyObject_HEAD
    Clock *clock; /* NULL: the gate is closed */
    int phase;
    char inside;         /* a module's forward is under way, whose parts' forwards are a part of it */
    PyObject *gradients; /* torch.is_grad_enabled */
    PyObject *compiler;  /* the namespace of torch.compiler; NULL: not looked at */
    PyObject *flag;      /* name of its flag: is code being run to be exported? */
} Gate;

/* Is the gate open, with nothing exported meanwhile? */
static int opens(const Gate *self)
{
    return is_plain(self->clock) &&
           (self->compiler == NULL || PyDict_GetItemWithError(self->compiler, self->flag) == Py_False);
}

/* The same, for a module's forward that begins. */
static int opens_for_module(const Gate *self)
{
    PyObject *asked = self->gradients;
    if (!opens(self) || is_set(self->clock->called) || asked == NULL) {
        return 0;
    }
    Py_INCREF(asked);
    PyObject *gradients = PyObject_CallNoArgs(asked);
    Py_DECREF(asked);
    Py_XDECREF(gradients);
    return gradients == Py_True && is_plain(self->clock); /* what was called may be anything */
}

static PyObject *gate_begin(PyObject *object, PyObject *unused)
{
    (void)unused;
    Gate *self = (Gate *)object;
    if (!opens(self) || !begin_phase(self->clock, self->phase, self->phase)) {
        return not_plain();
    }
    Py_RETURN_TRUE;
}

static PyObject *gate_begin_module(PyObject *object, PyObject *module)
{
    (void)module;
    Gate *self = (Gate *)object;
    if (!opens_for_module(self) || !begin_phase(self->clock, self->phase, self->phase)) {
        return not_plain();
    }
    Py_RETURN_TRUE;
}

/* begin_outermost(module, held): held is {id(module): weakref to it} */
static PyObject *gate_begin_outermost(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Gate *self = (Gate *)object;
    if (count != 2 || !PyDict_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "begin_outermost() takes a module and a dictionary");
        return NULL;
    }
    if (self->inside || !opens_for_module(self)) {
        return not_plain();
    }
    PyObject *identity = PyLong_FromVoidPtr(arguments[0]);
    PyObject *reference = identity == NULL ? NULL : PyDict_GetItemWithError(arguments[1], identity);
    Py_XDECREF(identity);
    if (reference == NULL || !leads_to(reference, arguments[0]) || !is_plain(self->clock) ||
        !begin_phase(self->clock, self->phase, self->phase)) {
        return not_plain();
    }
    self->inside = 1;
    Py_RETURN_TRUE;
}

static PyObject *gate_end(PyObject *object, PyObject *unused)
{
    (void)unused;
    Gate *self = (Gate *)object;
    if (!is_plain(self->clock) || !end_phase(self->clock, self->phase)) {
        return not_plain();
    }
    Py_RETURN_TRUE;
}

static PyObject *gate_end_module(PyObject *object, PyObject *module)
{
    (void)module;
    Gate *self = (Gate *)object;
    if (!opens(self) || !end_phase(self->clock, self->phase)) {
        return not_plain();
    }
    Py_RETURN_TRUE;
}

static PyObject *gate_end_outermost(PyObject *object, PyObject *unused)
{
    ((Gate *)object)->inside = 0;
    return gate_end(object, unused);
}

static PyObject *gate_open(PyObject *object, PyObject *clock)
{
    Gate *self = (Gate *)object;
    if (!PyObject_TypeCheck(clock, clock_type)) {
        PyErr_SetString(PyExc_TypeError, "open() takes a compiled clock");
        return NULL;
    }
    if (self->phase >= ((Clock *)clock)->stages) {
        PyErr_SetString(PyExc_ValueError, "the clock has no such phase");
        return NULL;
    }
    hold((PyObject **)&self->clock, clock);
    Py_RETURN_NONE;
}

static PyObject *gate_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    hold((PyObject **)&((Gate *)object)->clock, NULL);
    Py_RETURN_NONE;
}

static PyObject *gate_ask(PyObject *object, PyObject *arguments)
{
    Gate *self = (Gate *)object;
    PyObject *gradients, *compiler, *flag;
    if (!PyArg_ParseTuple(arguments, "OO!U", &gradients, &PyDict_Type, &compiler, &flag)) {
        return NULL;
    }
    hold(&self->compiler, NULL); /* looked at only together with the flag */
    hold(&self->flag, flag);
    hold(&self->compiler, compiler);
    hold(&self->gradients, gradients);
    Py_RETURN_NONE;
}

static int gate_init(PyObject *object, PyObject *arguments, PyObject *keywords)
{
    (void)keywords;
    int phase;
    if (!PyArg_ParseTuple(arguments, "i", &phase)) {
        return -1;
    }
    if (phase < 0 || phase >= MOST_PLACES) {
        PyErr_SetString(PyExc_ValueError, "there is no such phase");
        return -1;
    }
    ((Gate *)object)->phase = phase;
    gate_close(object, NULL);
    return 0;
}

static int gate_traverse(PyObject *object, visitproc visit, void *arg)
{
    Gate *self = (Gate *)object;
    VISIT_TYPE(object);
    Py_VISIT(self->clock);
    Py_VISIT(self->gradients);
    Py_VISIT(self->compiler);
    Py_VISIT(self->flag);
    return 0;
}

static int gate_drop(PyObject *object)
{
    Gate *self = (Gate *)object;
    Py_CLEAR(self->clock);
    Py_CLEAR(self->gradients);
    Py_CLEAR(self->compiler); /* before the flag */
    Py_CLEAR(self->flag);
    return 0;
}

static void gate_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    (void)gate_drop(object);
    release(object);
}

static PyMethodDef gate_methods[] = {
    {"open", gate_open, METH_O, "The clock alone listens."},
    {"close", gate_close, METH_NOARGS, "It does no more, or not alone."},
    {"ask", gate_ask, METH_VARARGS, "What to ask where a module's forward begins."},
    {"begin", gate_begin, METH_NOARGS, "The phase begins."},
    {"begin_module", gate_begin_module, METH_O, "A module's forward begins."},
    {"begin_outermost", (PyCFunction)(void (*)(void))gate_begin_outermost, METH_FASTCALL, "The same, of those held."},
    {"end", gate_end, METH_NOARGS, "It has ended."},
    {"end_module", gate_end_module, METH_O, "A module's forward has ended."},
    {"end_outermost", gate_end_outermost, METH_NOARGS, "The same, after begin_outermost()."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef gate_members[] = {
    {"inside", T_BOOL, offsetof(Gate, inside), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot gate_slots[] = {
    {Py_tp_doc, "Gate(phase); what begins and ends the phase answers False where it is not a plain case."},
    {Py_tp_init, gate_init},
    {Py_tp_traverse, gate_traverse},
    {Py_tp_clear, gate_drop},
    {Py_tp_dealloc, gate_dealloc},
    {Py_tp_methods, gate_methods},
    {Py_tp_members, gate_members},
    {0, NULL},
};

static PyType_Spec gate_spec = {
    "perfscope.collectors.phases._clock.Gate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, gate_slots};

static PyTypeObject *gate_type;

/* ---- Steps that pass ---- */

typedef struct {
    PyObject_HEAD
    PyObject *depth; /* {thread: steps of optimizers that it is inside} */
    Gate *gate;      /* of the optimizer's phase */
    PyObject *thread; /* key in `depth` of the thread `thread_id` */
    unsigned long thread_id;
    Clock *running; /* that was told of the step under way */
    PyObject *one, *zero, *unsaved, *completed_name;
    long long begun, completed, until, passed, noted, ended;
    char armed;
    PyObject *optimizer, *detector, *run_file, *agreed, *graph_task, *append, *waits;
    int64_t recent[RECENT];
    int64_t between[RECENT]; /* of the last `passed`: from the optimizer's end to the next step */
} PassingSteps;

#define OWNED(self)                                                                                                    \
    {                                                                                                                  \
        &(self)->depth, (PyObject **)&(self)->gate, &(self)->thread, (PyObject **)&(self)->running, &(self)->one,      \
            &(self)->zero, &(self)->unsaved, &(self)->completed_name, &(self)->optimizer, &(self)->detector,           \
            &(self)->run_file, &(self)->agreed, &(self)->graph_task, &(self)->append, &(self)->waits                   \
    }
#define OWNED_COUNT 15

/* Is this thread outside of any step? 0 where it is not, or with an exception set. */
static int is_outermost(PassingSteps *self, unsigned long thread)
{
    if (self->thread == NULL || self->thread_id != thread) {
        PyObject *key = PyLong_FromUnsignedLong(thread);
        if (key == NULL) {
            return 0;
        }
        hold(&self->thread, key);
        Py_DECREF(key);
        self->thread_id = thread;
    }
    PyObject *depth = PyDict_GetItemWithError(self->depth, self->thread);
    if (depth == NULL) {
        return !PyErr_Occurred();
    }
    return PyLong_AsLong(depth) == 0;
}

static PyObject *passing_begin(PyObject *object, PyObject *unused)
{
    (void)unused;
    PassingSteps *self = (PassingSteps *)object;
    Clock *clock = self->gate == NULL ? NULL : self->gate->clock;
    if (!is_plain(clock) || !is_outermost(self, clock->thread) ||
        PyDict_SetItem(self->depth, self->thread, self->one) < 0) {
        return not_plain();
    }
    if (!begin_phase(clock, self->gate->phase, self->gate->phase)) {
        if (PyDict_SetItem(self->depth, self->thread, self->zero) < 0) {
            PyErr_Clear();
        }
        return not_plain();
    }
    hold((PyObject **)&self->running, (PyObject *)clock);
    self->begun++;
    Py_RETURN_TRUE;
}

/* An attribute's truth; -1 with an exception set. */
static int truth_of(PyObject *object, PyObject *name)
{
    Py_INCREF(object);
    PyObject *value = PyObject_GetAttr(object, name);
    int truth = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    Py_DECREF(object);
    return truth;
}

/* Is the thread outside of every backward? -1 with an exception set. */
static int is_outside_backward(PassingSteps *self)
{
    PyObject *call = self->graph_task;
    Py_INCREF(call);
    PyObject *task = PyObject_CallNoArgs(call);
    Py_DECREF(call);
    if (task == NULL) {
        return -1;
    }
    long number = PyLong_AsLong(task);
    Py_DECREF(task);
    return number == -1 && PyErr_Occurred() ? -1 : number == NO_TASK;
}

/* Call `call` with one object, whose reference is taken; NULL stands for an exception that is set. */
static int called_with(PyObject *call, PyObject *argument)
{
    if (argument == NULL) {
        return 0;
    }
    Py_INCREF(call);
    PyObject *result = PyObject_CallFunctionObjArgs(call, argument, NULL);
    Py_DECREF(call);
    Py_DECREF(argument);
    Py_XDECREF(result);
    return result != NULL;
}

/* The step of an optimizer has ended: does it end a training step that is only to be stored? */
static int passes(PassingSteps *self, const Clock *clock, PyObject *optimizer)
{
    if (!self->armed || !is_plain(clock) || self->completed + 1 >= self->until) {
        return 0;
    }
    if (!leads_to(self->optimizer, optimizer)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    int unsaved = truth_of(self->run_file, self->unsaved);
    if (unsaved != 0) {
        return unsaved < 0 ? -1 : 0;
    }
    Py_ssize_t agreed = PyObject_Size(self->agreed);
    if (agreed != 0) {
        return agreed < 0 ? -1 : 0;
    }
    int outside = is_outside_backward(self);
    return outside < 0 ? -1 : outside && self->armed && is_plain(clock);
}

/* Store the step that has ended and begin the next. What fails leaves the step to be counted. */
static int store(PassingSteps *self, Clock *clock)
{
    int64_t now, duration = 0, began = clock->began;
    if (!look(clock, &now)) {
        return 0;
    }
    if (began) {
        duration = difference(now, began);
        if (is_set(self->waits) && !called_with(self->waits, PyLong_FromLongLong(duration))) {
            return 0;
        }
        if (!called_with(self->append, row_of(clock, self->completed, began, duration, 0))) {
            return 0;
        }
    }
    PyObject *completed = PyLong_FromLongLong(self->completed + 1), *detector = self->detector;
    if (completed == NULL) {
        return 0;
    }
    Py_INCREF(detector);
    int counted = PyObject_SetAttr(detector, self->completed_name, completed);
    Py_DECREF(detector);
    Py_DECREF(completed);
    if (counted < 0) {
        return 0;
    }
    self->completed++;
    if (began) {
        self->recent[self->noted++ % RECENT] = duration;
    }
    self->ended = now;
    clear(clock);
    if (look(clock, &now)) {
        clock->began = now;
        self->between[self->passed++ % RECENT] = difference(now, clock->since);
    } else {
        PyErr_Clear(); /* as it has just succeeded */
        clock->began = 0;
    }
    return 1;
}

static PyObject *passing_leave(PyObject *object, PyObject *optimizer)
{
    PassingSteps *self = (PassingSteps *)object;
    Clock *clock = self->running;
    self->running = NULL;
    if (clock == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "leave() without begin()");
        return NULL;
    }
    int ended = PyDict_SetItem(self->depth, self->thread, self->zero) == 0 && end_phase(clock, self->gate->phase);
    int done = optimizer == Py_None;
    if (ended && !done && clock == self->gate->clock) {
        done = passes(self, clock, optimizer) > 0 && store(self, clock);
    }
    Py_DECREF(clock);
    if (PyErr_Occurred()) {
        self->armed = 0;
        PyObject *answer = not_plain();
        Py_XDECREF(answer);
        if (answer == NULL) {
            return NULL;
        }
    }
    return PyBool_FromLong(done);
}

static PyObject *passing_arm(PyObject *object, PyObject *arguments)
{
    PassingSteps *self = (PassingSteps *)object;
    PyObject *optimizer, *detector, *run_file, *agreed, *graph_task, *append, *waits;
    long long completed, until;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOLL", &optimizer, &detector, &run_file, &agreed, &graph_task, &append,
                          &waits, &completed, &until)) {
        return NULL;
    }
    self->armed = 0;
    hold(&self->optimizer, optimizer);
    hold(&self->detector, detector);
    hold(&self->run_file, run_file);
    hold(&self->agreed, agreed);
    hold(&self->graph_task, graph_task);
    hold(&self->append, append);
    hold(&self->waits, waits);
    self->completed = completed;
    self->until = until;
    self->armed = 1;
    Py_RETURN_NONE;
}

static PyObject *passing_disarm(PyObject *object, PyObject *unused)
{
    (void)unused;
    ((PassingSteps *)object)->armed = 0;
    Py_RETURN_NONE;
}

/* The last of `count` values. */
static PyObject *last_of(const int64_t *values, long long count)
{
    long long first = count > RECENT ? count - RECENT : 0;
    PyObject *list = PyList_New((Py_ssize_t)(count - first));
    for (long long at = first; list != NULL && at < count; at++) {
        PyObject *value = PyLong_FromLongLong(values[at % RECENT]);
        if (value == NULL || PyList_SetItem(list, (Py_ssize_t)(at - first), value) < 0) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

static PyObject *passing_take_recent(PyObject *object, PyObject *unused)
{
    (void)unused;
    PassingSteps *self = (PassingSteps *)object;
    PyObject *list = last_of(self->recent, self->noted);
    if (list != NULL) {
        self->noted = 0;
    }
    return list;
}

static PyObject *passing_between(PyObject *object, PyObject *unused)
{
    (void)unused;
    PassingSteps *self = (PassingSteps *)object;
    return last_of(self->between, self->passed);
}

static int passing_init(PyObject *object, PyObject *arguments, PyObject *keywords)
{
    (void)keywords;
    PassingSteps *self = (PassingSteps *)object;
    PyObject *depth, *gate;
    if (!PyArg_ParseTuple(arguments, "O!O!", &PyDict_Type, &depth, gate_type, &gate)) {
        return -1;
    }
    if (self->depth != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "PassingSteps() is made already");
        return -1;
    }
    self->one = PyLong_FromLong(1);
    self->zero = PyLong_FromLong(0);
    self->unsaved = PyUnicode_InternFromString("unsaved");
    self->completed_name = PyUnicode_InternFromString("completed");
    if (self->one == NULL || self->zero == NULL || self->unsaved == NULL || self->completed_name == NULL) {
        return -1;
    }
    hold(&self->depth, depth);
    hold((PyObject **)&self->gate, gate);
    return 0;
}

static int passing_traverse(PyObject *object, visitproc visit, void *arg)
{
    PassingSteps *self = (PassingSteps *)object;
    PyObject **owned[] = OWNED(self);
    VISIT_TYPE(object);
    for (int at = 0; at < OWNED_COUNT; at++) {
        Py_VISIT(*owned[at]);
    }
    return 0;
}

/* What is used unless `gate` is none is dropped with it. */
static int passing_drop(PyObject *object)
{
    PassingSteps *self = (PassingSteps *)object;
    PyObject **owned[] = OWNED(self);
    self->armed = 0;
    for (int at = 0; at < OWNED_COUNT; at++) {
        Py_CLEAR(*owned[at]);
    }
    return 0;
}

static void passing_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    (void)passing_drop(object);
    release(object);
}

static PyMethodDef passing_methods[] = {
    {"begin", passing_begin, METH_NOARGS, "An optimizer's step begins; False where this is none to be handled here."},
    {"leave", passing_leave, METH_O, "It has ended, of this optimizer, or failed (None). False: report it."},
    {"arm", passing_arm, METH_VARARGS, "From now on the steps of this optimizer pass."},
    {"disarm", passing_disarm, METH_NOARGS, "They do no more."},
    {"between", passing_between, METH_NOARGS, "What lay between the last of them and the next steps, ns."},
    {"take_recent", passing_take_recent, METH_NOARGS, "How long the last steps took that passed, ns."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef passing_members[] = {
    {"begun", T_LONGLONG, offsetof(PassingSteps, begun), 0, NULL},
    {"passed", T_LONGLONG, offsetof(PassingSteps, passed), READONLY, NULL},
    {"ended", T_LONGLONG, offsetof(PassingSteps, ended), READONLY, NULL},
    {"completed", T_LONGLONG, offsetof(PassingSteps, completed), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot passing_slots[] = {
    {Py_tp_doc, "PassingSteps(depth, gate)"},
    {Py_tp_init, passing_init},
    {Py_tp_traverse, passing_traverse},
    {Py_tp_clear, passing_drop},
    {Py_tp_dealloc, passing_dealloc},
    {Py_tp_methods, passing_methods},
    {Py_tp_members, passing_members},
    {0, NULL},
};

static PyType_Spec passing_spec = {
    "perfscope.collectors.phases._clock.PassingSteps", sizeof(PassingSteps), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, passing_slots};

/* ---- The module ---- */

/* One per process: the types are static, as the checks of arguments need them. */
static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_clock", "Times the phases of training steps.", -1, NULL, NULL, NULL, NULL, NULL};

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec, const char *name)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL) {
        return NULL;
    }
    Py_INCREF(type); /* one reference for the module, one for the static variable */
    if (PyModule_AddObject(module, name, type) < 0) {
        Py_DECREF(type);
        Py_DECREF(type);
        return NULL;
    }
    return (PyTypeObject *)type;
}

PyMODINIT_FUNC PyInit__clock(void)
{
    PyObject *module = PyModule_Create(&module_definition);
    if (module == NULL) {
        return NULL;
    }
    clock_type = add_type(module, &clock_spec, "Clock");
    gate_type = clock_type == NULL ? NULL : add_type(module, &gate_spec, "Gate");
    if (gate_type == NULL || add_type(module, &passing_spec, "PassingSteps") == NULL) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
