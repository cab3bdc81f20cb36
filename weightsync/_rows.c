/* Copies many rows of bytes in one call, without the interpreter lock.

   A row is one part of one tensor. Twenty thousand small tensors cost twenty thousand interpreter
   steps otherwise, and two threads of them fight for one lock.

   move(into, out_of, length, begin, end, stream): three arrays of 64-bit integers (addresses,
   addresses, bytes), and which of their entries to copy. Rows with a zero source are left out.
   With stream, long rows are written past the cache: the destination is not read first, which
   saves a third of the memory traffic of a copy that is not looked at again soon. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define STREAM_FROM 4096 /* bytes; below, setting out costs more than it saves */

static void copy_past_cache(char *into, const char *out_of, size_t length) {
#if defined(__SSE2__)
    size_t head = (size_t)(-(intptr_t)into & 63);
    memcpy(into, out_of, head);
    into += head, out_of += head, length -= head;
    size_t lines = length / 64;
    for (size_t line = 0; line < lines; line++, into += 64, out_of += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)out_of);
        __m128i b = _mm_loadu_si128((const __m128i *)(out_of + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(out_of + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(out_of + 48));
        _mm_stream_si128((__m128i *)into, a);
        _mm_stream_si128((__m128i *)(into + 16), b);
        _mm_stream_si128((__m128i *)(into + 32), c);
        _mm_stream_si128((__m128i *)(into + 48), d);
    }
    length -= lines * 64;
#endif
    memcpy(into, out_of, length);
}

static PyObject *move(PyObject *self, PyObject *arguments) {
    Py_buffer into, out_of, length;
    Py_ssize_t begin, end;
    int stream;
    if (!PyArg_ParseTuple(arguments, "y*y*y*nnp", &into, &out_of, &length, &begin, &end, &stream))
        return NULL;
    Py_ssize_t rows = length.len / (Py_ssize_t)sizeof(int64_t);
    int fits = begin >= 0 && begin <= end && end <= rows && into.len == length.len &&
               out_of.len == length.len;
    if (fits) {
        const int64_t *to = into.buf, *from = out_of.buf, *bytes = length.buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t row = begin; row < end; row++) {
            if (from[row] == 0) continue;
            char *destination = (char *)(intptr_t)to[row];
            const char *source = (const char *)(intptr_t)from[row];
            if (stream && bytes[row] >= STREAM_FROM)
                copy_past_cache(destination, source, (size_t)bytes[row]);
            else
                memcpy(destination, source, (size_t)bytes[row]);
        }
#if defined(__SSE2__)
        _mm_sfence(); /* streamed writes are visible before anything that follows */
#endif
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&into);
    PyBuffer_Release(&out_of);
    PyBuffer_Release(&length);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "arrays of different lengths, or no such rows");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"move", move, METH_VARARGS, "move(into, out_of, length, begin, end, stream)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_rows", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&module); }
