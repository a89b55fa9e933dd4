/* Rectangles of stored pictures, decoded only where and as large as they are needed, and resized into given memory.

   One call does a batch on threads that are kept, without the GIL. Per picture: libjpeg-turbo decodes the rows and columns of the rectangle (and
   the few around it that filters see), scaled down by 2, 4 or 8 inside the inverse DCT where the result is at least as large as the output;
   libwebp decodes a cropped window. Then a triangle filter with antialiasing (PIL's BILINEAR) goes down the columns, then along the rows, in 16-bit
   fixed point. What this file does not do, and what the libraries find fault with, it says (FALLBACK), and Python does it or finds the
   error. See docs/loader.md. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <jpeglib.h>
#include <jerror.h>
#include <webp/decode.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define X86 1
#else
#define X86 0
#endif

enum { OK = 0, FALLBACK = 1, SIZE_MISMATCH = 2, NO_MEMORY = 3 };
enum { WEBP = 1, JPEG = 2 };
enum { WEBP_EXIF = 0x08, WEBP_ICC = 0x20 };
enum { BITS = 14, MOST_SCANS = 100, MOST_THREADS = 256, MARGIN = 3 };
/* Rows around a rectangle that are decoded beyond what the filter sees. */
enum { ROWS_AROUND = 4 };
/* Buffers that a thread keeps while it has nothing to do. */
enum { KEPT_BYTES = 8 << 20 };

typedef struct {
    const uint8_t *data;
    size_t size;
    int codec, width, height, flip;
    double x0, y0, x1, y1;
    uint8_t *out;
    int32_t *status;
} Job;

/* The weights of one axis: output i takes count[i] inputs from first[i] on, with weights at i * stride. Whole: one input each, in order. */
typedef struct {
    int *first, *count;
    int16_t *weights;
    int stride, outputs, whole, capacity;
    size_t weights_capacity;
} Axis;

typedef struct {
    uint8_t *pixels, *rows, *cut;
    size_t pixels_capacity, rows_capacity, cut_capacity;
    JSAMPROW *lines;
    size_t lines_capacity;
    Axis horizontal, vertical;
} Scratch;

/* Decoded pixels, `columns` x `lines`, rows `pitch` bytes apart, and the rectangle in their coordinates. */
typedef struct {
    size_t pitch;
    int columns, lines;
    double x0, y0, x1, y1;
} Window;

typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf back;
} Errors;

typedef struct Batch {
    Job *jobs;
    Py_ssize_t count;
    int height, width, channels, refuse_icc;
    /* For the pool, under its lock: at most `threads` pictures at a time; `taken` and `done` count them. */
    int threads, active;
    long long turn;
    Py_ssize_t taken, done;
    double seconds; /* of threads */
    pthread_cond_t over;
    struct Batch *next;
} Batch;

static int has_avx2 = 0;

/* Memory ------------------------------------------------------------------------------------------------------------- */

static void *grown(void *old, size_t *capacity, size_t wanted) {
    if (wanted <= *capacity) {
        return old;
    }
    void *new = realloc(old, wanted);
    if (new != NULL) {
        *capacity = wanted;
    }
    return new;
}

#define GROW(pointer, capacity, wanted)                         \
    do {                                                        \
        void *grown_ = grown(pointer, &(capacity), wanted);     \
        if (grown_ == NULL) {                                   \
            return NO_MEMORY;                                   \
        }                                                       \
        (pointer) = grown_;                                     \
    } while (0)

static void release(Scratch *s) {
    free(s->pixels);
    free(s->rows);
    free(s->cut);
    free(s->lines);
    free(s->horizontal.first);
    free(s->horizontal.count);
    free(s->horizontal.weights);
    free(s->vertical.first);
    free(s->vertical.count);
    free(s->vertical.weights);
}

/* Filter weights ------------------------------------------------------------------------------------------------------ */

/* Triangle filter from [low, high) of `inputs` to `outputs`; weights sum to 2^BITS. */
static int axis_weights(Axis *axis, double low, double high, int inputs, int outputs) {
    double scale = (high - low) / outputs, wide = scale < 1.0 ? 1.0 : scale;
    int most = (int)ceil(wide) * 2 + 2;
    int stride = (most + 3) & ~3;
    if (outputs > axis->capacity) {
        free(axis->first);
        free(axis->count);
        axis->first = malloc(sizeof(int) * (size_t)outputs);
        axis->count = malloc(sizeof(int) * (size_t)outputs);
        axis->capacity = outputs;
        if (axis->first == NULL || axis->count == NULL) {
            axis->capacity = 0;
            return NO_MEMORY;
        }
    }
    GROW(axis->weights, axis->weights_capacity, sizeof(int16_t) * (size_t)outputs * (size_t)stride);
    memset(axis->weights, 0, sizeof(int16_t) * (size_t)outputs * (size_t)stride);
    axis->stride = stride;
    axis->outputs = outputs;
    axis->whole = 1;
    for (int i = 0; i < outputs; i++) {
        double centre = low + (i + 0.5) * scale;
        int from = (int)(centre - wide + 0.5), to = (int)(centre + wide + 0.5);
        from = from < 0 ? 0 : from;
        to = to > inputs ? inputs : to;
        if (from >= to) {
            from = from >= inputs ? inputs - 1 : from;
            to = from + 1;
        }
        if (to - from > most) {
            to = from + most;
        }
        double values[64], *value = values, total = 0.0;
        double *heap = NULL;
        if (to - from > 64) {
            value = heap = malloc(sizeof(double) * (size_t)(to - from));
            if (heap == NULL) {
                return NO_MEMORY;
            }
        }
        for (int k = from; k < to; k++) {
            double distance = fabs((k - centre + 0.5) / wide);
            value[k - from] = distance < 1.0 ? 1.0 - distance : 0.0;
            total += value[k - from];
        }
        int16_t *weights = axis->weights + (size_t)i * (size_t)stride;
        /* What rounding leaves goes to the next weight: thousands of weights below one still mean what they should. */
        double running = 0.0;
        int sum = 0;
        for (int k = 0; k < to - from; k++) {
            running += value[k];
            int upto = total > 0.0 && k < to - from - 1 ? (int)(running / total * (1 << BITS) + 0.5) : 1 << BITS;
            weights[k] = (int16_t)(upto - sum);
            sum = upto;
        }
        free(heap);
        int lead = 0, count = to - from;
        while (count > 1 && weights[count - 1] == 0) {
            count--;
        }
        while (lead < count - 1 && weights[lead] == 0) {
            lead++;
        }
        if (lead) {
            memmove(weights, weights + lead, sizeof(int16_t) * (size_t)(count - lead));
            memset(weights + count - lead, 0, sizeof(int16_t) * (size_t)lead);
        }
        axis->first[i] = from + lead;
        axis->count[i] = count - lead;
        axis->whole &= count - lead == 1 && axis->first[i] == axis->first[0] + i;
    }
    return OK;
}

static inline uint8_t clamp(int value) {
    value = (value + (1 << (BITS - 1))) >> BITS;
    return value < 0 ? 0 : value > 255 ? 255 : (uint8_t)value;
}

/* One output row: a weighted sum of `count` rows of `length` bytes that lie `pitch` apart. */
static void down_plain(uint8_t *out, const uint8_t *rows, size_t pitch, const int16_t *weights, int count, int length) {
    for (int x = 0; x < length; x++) {
        int sum = 0;
        for (int k = 0; k < count; k++) {
            sum += weights[k] * rows[(size_t)k * pitch + (size_t)x];
        }
        out[x] = clamp(sum);
    }
}

/* One output row of `outputs` pixels out of one input row. */
static void along_plain(uint8_t *out, int flip, const uint8_t *row, const Axis *axis, int channels) {
    for (int n = 0; n < axis->outputs; n++, out += channels) {
        int i = flip ? axis->outputs - 1 - n : n;
        const uint8_t *from = row + (size_t)axis->first[i] * (size_t)channels;
        const int16_t *weights = axis->weights + (size_t)i * (size_t)axis->stride;
        for (int c = 0; c < channels; c++) {
            int sum = 0;
            for (int k = 0; k < axis->count[i]; k++) {
                sum += weights[k] * from[k * channels + c];
            }
            out[c] = clamp(sum);
        }
    }
}

#if X86
__attribute__((target("avx2"))) static void down_avx2(uint8_t *out, const uint8_t *rows, size_t pitch, const int16_t *weights,
                                                       int count, int length) {
    const __m256i half = _mm256_set1_epi32(1 << (BITS - 1)), zero = _mm256_setzero_si256();
    int x = 0;
    for (; x + 32 <= length; x += 32) {
        __m256i a = half, b = half, c = half, d = half;
        int k = 0;
        for (; k < count; k += 2) {
            const uint8_t *first = rows + (size_t)k * pitch + (size_t)x;
            int pair = k + 1 < count;
            __m256i weight = _mm256_set1_epi32((int)((uint16_t)weights[k] | (pair ? (uint32_t)(uint16_t)weights[k + 1] << 16 : 0)));
            __m256i upper = _mm256_loadu_si256((const __m256i *)first);
            __m256i lower = pair ? _mm256_loadu_si256((const __m256i *)(first + pitch)) : zero;
            __m256i low = _mm256_unpacklo_epi8(upper, lower), high = _mm256_unpackhi_epi8(upper, lower);
            a = _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), weight));
            b = _mm256_add_epi32(b, _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), weight));
            c = _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), weight));
            d = _mm256_add_epi32(d, _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), weight));
        }
        __m256i low = _mm256_packs_epi32(_mm256_srai_epi32(a, BITS), _mm256_srai_epi32(b, BITS));
        __m256i high = _mm256_packs_epi32(_mm256_srai_epi32(c, BITS), _mm256_srai_epi32(d, BITS));
        _mm256_storeu_si256((__m256i *)(out + x), _mm256_packus_epi16(low, high));
    }
    if (x < length) {
        down_plain(out + x, rows + x, pitch, weights, count, length - x);
    }
}

/* One output pixel of two rows: sums of three channels, of either row in a half. */
__attribute__((target("avx2"), always_inline)) static inline __m256i weigh_avx2(const uint8_t *row, const uint8_t *row_too,
                                                                                 const Axis *axis, int i) {
    const __m256i first_two =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
    const __m256i last_two =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1));
    size_t at = (size_t)axis->first[i] * 3;
    const int16_t *weights = axis->weights + (size_t)i * (size_t)axis->stride;
    __m256i sum = _mm256_set1_epi32(1 << (BITS - 1));
    for (int k = 0; k < axis->count[i]; k += 4, at += 12) {
        __m128i pixels = _mm_loadu_si128((const __m128i *)(row + at));
        __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(pixels), _mm_loadu_si128((const __m128i *)(row_too + at)), 1);
        int32_t a, b;
        memcpy(&a, weights + k, 4);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(both, first_two), _mm256_set1_epi32(a)));
        if (k + 2 < axis->count[i]) {
            memcpy(&b, weights + k + 2, 4);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(both, last_two), _mm256_set1_epi32(b)));
        }
    }
    return _mm256_srai_epi32(sum, BITS);
}

/* The first `bytes`, up to 12. */
__attribute__((target("avx2"), always_inline)) static inline void put_avx2(uint8_t *out, __m128i pixels, int bytes) {
    if (bytes == 12) {
        int32_t last = _mm_extract_epi32(pixels, 2);
        _mm_storel_epi64((__m128i *)out, pixels);
        memcpy(out + 8, &last, 4);
    } else {
        uint8_t all[16];
        _mm_storeu_si128((__m128i *)all, pixels);
        memcpy(out, all, (size_t)bytes);
    }
}

/* Three channels, four outputs at a time, two rows at once. Reads up to 16 bytes from a pixel on: the caller's rows have that room. */
__attribute__((target("avx2"))) static void along_avx2(uint8_t *out, uint8_t *out_too, int flip, const uint8_t *row,
                                                        const uint8_t *row_too, const Axis *axis) {
    const __m256i close = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    int last = axis->outputs - 1, step = flip ? -1 : 1;
    for (int n = 0, i = flip ? last : 0; n <= last; n += 4, i += 4 * step, out += 12, out_too += 12) {
        int more = last - n < 3 ? last - n : 3;
        __m256i a = weigh_avx2(row, row_too, axis, i);
        __m256i b = more > 0 ? weigh_avx2(row, row_too, axis, i + step) : a;
        __m256i c = more > 1 ? weigh_avx2(row, row_too, axis, i + 2 * step) : a;
        __m256i d = more > 2 ? weigh_avx2(row, row_too, axis, i + 3 * step) : a;
        __m256i four = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        four = _mm256_shuffle_epi8(four, close);
        put_avx2(out, _mm256_castsi256_si128(four), 3 * more + 3);
        put_avx2(out_too, _mm256_extracti128_si256(four, 1), 3 * more + 3);
    }
}
#endif

/* Output row `y` before its columns are filtered: in `room`, or where it lies. */
static const uint8_t *down(const Scratch *s, const Window *window, const uint8_t *pixels, int y, uint8_t *room) {
    const int16_t *weights = s->vertical.weights + (size_t)y * (size_t)s->vertical.stride;
    const uint8_t *from = pixels + (size_t)s->vertical.first[y] * window->pitch;
    int length = (int)window->pitch, count = s->vertical.count[y];
    if (count == 1) {
        return from;
    }
#if X86
    if (has_avx2) {
        down_avx2(room, from, window->pitch, weights, count, length);
        return room;
    }
#endif
    down_plain(room, from, window->pitch, weights, count, length);
    return room;
}

/* The window's pixels, with 16 readable bytes behind the last, -> the job's output. */
static int resample(Scratch *s, const Batch *batch, const Job *job, const uint8_t *pixels, const Window *window) {
    int channels = batch->channels, failed;
    if ((failed = axis_weights(&s->vertical, window->y0, window->y1, window->lines, batch->height)) ||
        (failed = axis_weights(&s->horizontal, window->x0, window->x1, window->columns, batch->width))) {
        return failed;
    }
    size_t length = (size_t)window->columns * (size_t)channels, row_bytes = (size_t)batch->width * (size_t)channels;
    GROW(s->rows, s->rows_capacity, 2 * (length + 64));
    for (int y = 0; y < batch->height; y += 2) {
        int y_too = y + 1 < batch->height ? y + 1 : y;
        uint8_t *out = job->out + (size_t)y * row_bytes, *out_too = job->out + (size_t)y_too * row_bytes;
        const uint8_t *row = down(s, window, pixels, y, s->rows);
        const uint8_t *row_too = y_too == y ? row : down(s, window, pixels, y_too, s->rows + length + 64);
        if (s->horizontal.whole && !job->flip) {
            size_t from = (size_t)s->horizontal.first[0] * (size_t)channels;
            memcpy(out, row + from, row_bytes);
            memcpy(out_too, row_too + from, row_bytes);
            continue;
        }
#if X86
        if (has_avx2 && channels == 3) {
            along_avx2(out, out_too, job->flip, row, row_too, &s->horizontal);
            continue;
        }
#endif
        along_plain(out, job->flip, row, &s->horizontal, channels);
        along_plain(out_too, job->flip, row_too, &s->horizontal, channels);
    }
    return OK;
}

/* JPEG ---------------------------------------------------------------------------------------------------------------- */

static void fail(j_common_ptr info) {
    Errors *errors = (Errors *)info->err;
    longjmp(errors->back, 1);
}

static void warn(j_common_ptr info, int level) {
    if (level < 0) {
        info->err->num_warnings++;
    }
}

static void quiet(j_common_ptr info) { (void)info; }

/* A file of thousands of scans would take minutes. */
static void watch_scans(j_common_ptr info) {
    if (((j_decompress_ptr)info)->input_scan_number > MOST_SCANS) {
        info->err->msg_code = JERR_BAD_PROGRESSION;
        fail(info);
    }
}

static unsigned get16(const uint8_t *p, int big) { return big ? (unsigned)p[0] << 8 | p[1] : (unsigned)p[1] << 8 | p[0]; }

static uint32_t get32(const uint8_t *p, int big) {
    return big ? (uint32_t)get16(p, 1) << 16 | get16(p + 2, 1) : (uint32_t)get16(p + 2, 0) << 16 | get16(p, 0);
}

/* Whether the picture lies as it is stored, by its EXIF; odd EXIF counts as no. */
static int upright(const uint8_t *data, unsigned length) {
    if (length < 6 || memcmp(data, "Exif\0\0", 6) != 0) {
        return 1;
    }
    const uint8_t *tiff = data + 6;
    unsigned size = length - 6;
    if (size < 14 || (memcmp(tiff, "II*\0", 4) != 0 && memcmp(tiff, "MM\0*", 4) != 0)) {
        return 0;
    }
    int big = tiff[0] == 'M';
    uint32_t at = get32(tiff + 4, big);
    if (at > size - 2) {
        return 0;
    }
    unsigned entries = get16(tiff + at, big);
    for (unsigned i = 0; i < entries; i++) {
        uint64_t entry = (uint64_t)at + 2 + (uint64_t)i * 12;
        if (entry + 12 > size) {
            return 0;
        }
        if (get16(tiff + entry, big) == 0x0112) {
            return get16(tiff + entry + 2, big) == 3 && get32(tiff + entry + 4, big) == 1 && get16(tiff + entry + 8, big) == 1;
        }
    }
    return 1;
}

static int jpeg_markers(const struct jpeg_decompress_struct *info, int refuse_icc) {
    for (jpeg_saved_marker_ptr marker = info->marker_list; marker != NULL; marker = marker->next) {
        if (marker->marker == JPEG_APP0 + 1 && !upright(marker->data, marker->data_length)) {
            return FALLBACK;
        }
        if (marker->marker == JPEG_APP0 + 2 && refuse_icc && marker->data_length >= 12 &&
            memcmp(marker->data, "ICC_PROFILE", 12) == 0) {
            return FALLBACK;
        }
    }
    return OK;
}

/* Whether the scans read so far hold all of the picture: libjpeg shows a part of it without a warning. */
static int complete(const struct jpeg_decompress_struct *info) {
    for (int c = 0; c < info->num_components; c++) {
        if (info->comp_info[c].quant_table == NULL) {
            return 0;
        }
        for (int k = 0; info->progressive_mode && k < DCTSIZE2; k++) {
            if (info->coef_bits == NULL || info->coef_bits[c][k] != 0) {
                return 0;
            }
        }
    }
    return 1;
}

/* Whether the components lie as most files have them. Of others libjpeg-turbo skips and crops wrongly (2x4 and 4x2: it shows memory). */
static int usual_sampling(const struct jpeg_decompress_struct *info) {
    if (info->num_components == 1) {
        return 1;
    }
    for (int c = 1; c < info->num_components; c++) {
        if (info->comp_info[c].h_samp_factor != 1 || info->comp_info[c].v_samp_factor != 1) {
            return 0;
        }
    }
    int across = info->comp_info[0].h_samp_factor, down = info->comp_info[0].v_samp_factor;
    return across <= 2 ? down <= 2 : down == 1;
}

/* The largest of 1, 2, 4, 8 by which the rectangle can be made smaller and still be no smaller than the output. */
static int shrink_of(const Batch *batch, const Job *job) {
    int shrink = 8;
    while (shrink > 1 && ((job->x1 - job->x0) < (double)shrink * batch->width || (job->y1 - job->y0) < (double)shrink * batch->height)) {
        shrink /= 2;
    }
    return shrink;
}

/* The rectangle and what is around it into the scratch pixels. Errors of libjpeg jump out of here. */
static int jpeg_window(struct jpeg_decompress_struct *info, Scratch *s, const Batch *batch, const Job *job, Window *window) {
    jpeg_mem_src(info, job->data, (unsigned long)job->size);
    jpeg_save_markers(info, JPEG_APP0 + 1, 0xFFFF);
    jpeg_save_markers(info, JPEG_APP0 + 2, 14);
    jpeg_read_header(info, TRUE);
    int verdict = jpeg_markers(info, batch->refuse_icc);
    if (info->num_components != 1 && info->num_components != 3) {
        verdict = FALLBACK;
    }
    if (info->jpeg_color_space != JCS_YCbCr && info->jpeg_color_space != JCS_GRAYSCALE && info->jpeg_color_space != JCS_RGB) {
        verdict = FALLBACK;
    }
    if (batch->channels == 1 && info->jpeg_color_space == JCS_RGB) {
        verdict = FALLBACK;
    }
    if (!usual_sampling(info)) {
        verdict = FALLBACK;
    }
    if (verdict == OK && ((int)info->image_width != job->width || (int)info->image_height != job->height)) {
        verdict = SIZE_MISMATCH;
    }
    if (verdict != OK) {
        return verdict;
    }
    int shrink = shrink_of(batch, job);
    info->scale_num = 8 / (unsigned)shrink;
    info->scale_denom = 8;
    info->out_color_space = batch->channels == 3 ? JCS_RGB : JCS_GRAYSCALE;
    info->dct_method = JDCT_ISLOW;
    info->do_fancy_upsampling = TRUE;
    info->buffered_image = FALSE;
    jpeg_start_decompress(info);
    if (!complete(info)) {
        return FALLBACK;
    }
    int full_width = (int)info->output_width, full_height = (int)info->output_height;
    double x0 = job->x0 / shrink, x1 = job->x1 / shrink, y0 = job->y0 / shrink, y1 = job->y1 / shrink;
    double reach_x = fmax(1.0, (x1 - x0) / batch->width), reach_y = fmax(1.0, (y1 - y0) / batch->height);
    int left = (int)floor(x0 - reach_x) - MARGIN, right = (int)ceil(x1 + reach_x) + MARGIN;
    int top = (int)floor(y0 - reach_y), bottom = (int)ceil(y1 + reach_y) + 1;
    left = left < 0 ? 0 : left;
    top = top < 0 ? 0 : top;
    right = right > full_width ? full_width : right;
    bottom = bottom > full_height ? full_height : bottom;
    if (left > 0 || right < full_width) {
        JDIMENSION offset = (JDIMENSION)left, wide = (JDIMENSION)(right - left);
        jpeg_crop_scanline(info, &offset, &wide);
        left = (int)offset;
        right = (int)(offset + wide);
    }
    int columns = right - left, lines = bottom - top;
    size_t pitch = (size_t)columns * (size_t)batch->channels;
    size_t wanted = pitch * (size_t)lines + 64, line_bytes = sizeof(JSAMPROW) * (size_t)lines;
    GROW(s->pixels, s->pixels_capacity, wanted);
    GROW(s->lines, s->lines_capacity, line_bytes);
    for (int y = 0; y < lines; y++) {
        s->lines[y] = s->pixels + (size_t)y * pitch;
    }
    if (top > 0) {
        jpeg_skip_scanlines(info, (JDIMENSION)top);
    }
    while ((int)info->output_scanline < bottom) {
        JDIMENSION at = info->output_scanline - (JDIMENSION)top;
        if (at >= (JDIMENSION)lines || jpeg_read_scanlines(info, s->lines + at, (JDIMENSION)lines - at) == 0) {
            return FALLBACK;
        }
    }
    *window = (Window){pitch, columns, lines, x0 - left, y0 - top, x1 - left, y1 - top};
    return info->err->num_warnings ? FALLBACK : OK;
}

/* Header of a JPEG whose one scan restarts after every group of MCUs, of which a whole number make a row. */
typedef struct {
    size_t sof, scan; /* where the frame header and the entropy-coded data begin */
    int width, height, mcu_width, mcu_height;
    int rows, groups, group; /* rows of MCUs, groups of a row, pixels across a group */
} Restarts;

/* Whether a JPEG is one of those, and as large as its job says. */
static int restarts(const Job *job, Restarts *found) {
    const uint8_t *data = job->data;
    size_t size = job->size, at = 2;
    int components = 0, interval = 0, across = 1, down = 1;
    memset(found, 0, sizeof *found);
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) {
        return 0;
    }
    for (;;) {
        while (at + 1 < size && data[at] == 0xFF && data[at + 1] == 0xFF) {
            at++;
        }
        if (at + 4 > size || data[at] != 0xFF) {
            return 0;
        }
        unsigned marker = data[at + 1], length = get16(data + at + 2, 1);
        const uint8_t *body = data + at + 4;
        if (length < 2 || length > size - at - 2) {
            return 0;
        }
        if (marker == 0xC0 || marker == 0xC1) {
            components = length < 8 ? 0 : body[5];
            if (found->sof || (components != 1 && components != 3) || length < 8u + 3u * (unsigned)components) {
                return 0;
            }
            found->sof = at;
            found->height = (int)get16(body + 1, 1);
            found->width = (int)get16(body + 3, 1);
            for (int c = 0; c < components && components > 1; c++) {
                int factors = body[7 + 3 * c];
                across = factors >> 4 > across ? factors >> 4 : across;
                down = (factors & 15) > down ? factors & 15 : down;
            }
        } else if (marker == 0xDD) {
            interval = length == 4 ? (int)get16(body, 1) : 0;
        } else if (marker == 0xDA) {
            if (length < 3 || body[0] != components) {
                return 0;
            }
            found->scan = at + 2 + length;
            break;
        } else if (!(marker == 0xC4 || marker == 0xDB || marker >= 0xE0)) {
            return 0; /* another way of coding */
        }
        at += 2 + length;
    }
    int columns = (found->width + 8 * across - 1) / (8 * across);
    if (!found->sof || !interval || columns % interval || found->width != job->width || found->height != job->height) {
        return 0;
    }
    found->mcu_width = 8 * across;
    found->mcu_height = 8 * down;
    found->rows = (found->height + 8 * down - 1) / (8 * down);
    found->groups = columns / interval;
    found->group = interval * found->mcu_width;
    return 1;
}

/* Of a JPEG that restarts after every group of MCUs, only those around the rectangle, as a smaller picture: what lies above and beside them is
   not decoded. Any other stays as it is. */
static int cut_out(Scratch *s, const Batch *batch, Job *job) {
    Restarts is;
    if (!restarts(job, &is)) {
        return OK;
    }
    double high = fmax(1.0, (job->y1 - job->y0) / batch->height) + ROWS_AROUND;
    int first = (int)fmax(0.0, job->y0 - high) / is.mcu_height - 1, last = (int)(job->y1 + high) / is.mcu_height + 2;
    first = first < 0 ? 0 : first;
    last = last > is.rows ? is.rows : last;
    /* Pixels at an edge that the whole picture does not have are others: an MCU more, and what jpeg_window takes. */
    double wide = fmax(1.0, (job->x1 - job->x0) / batch->width) + MARGIN * shrink_of(batch, job) + is.mcu_width;
    int left = (int)(fmax(0.0, job->x0 - wide) / is.group), right = (int)((job->x1 + wide) / is.group) + 1;
    right = right > is.groups ? is.groups : right;
    if (!first && !left && right == is.groups) {
        return OK;
    }
    GROW(s->cut, s->cut_capacity, job->size + 2);
    uint8_t *out = s->cut;
    const uint8_t *end = job->data + job->size, *at = job->data + is.scan, *from = at;
    memcpy(out, job->data, is.scan);
    int height = (is.height < last * is.mcu_height ? is.height : last * is.mcu_height) - first * is.mcu_height;
    int width = (is.width < right * is.group ? is.width : right * is.group) - left * is.group;
    out[is.sof + 5] = (uint8_t)(height >> 8);
    out[is.sof + 6] = (uint8_t)height;
    out[is.sof + 7] = (uint8_t)(width >> 8);
    out[is.sof + 8] = (uint8_t)width;
    out += is.scan;
    int row = 0, group = 0, number = 0, kept = 0;
    for (;;) {
        at = memchr(at, 0xFF, (size_t)(end - at));
        if (at == NULL || end - at < 2) {
            return OK;
        }
        int marker = at[1];
        if (marker == 0 || marker == 0xFF) {
            at += marker ? 1 : 2;
            continue;
        }
        if (row == is.rows - 1 && group == is.groups - 1 ? marker != 0xD9 : marker != 0xD0 + number % 8) {
            return OK; /* not in order: libjpeg finds the fault */
        }
        int done = row == last - 1 && group == right - 1;
        if (row >= first && group >= left && group < right) {
            memcpy(out, from, (size_t)(at - from));
            out += at - from;
            *out++ = 0xFF;
            *out++ = (uint8_t)(done ? 0xD9 : 0xD0 + kept++ % 8);
        }
        if (done) {
            break;
        }
        number++;
        if (++group == is.groups) {
            group = 0;
            row++;
        }
        at += 2;
        from = at;
    }
    job->data = s->cut;
    job->size = (size_t)(out - s->cut);
    job->height = height;
    job->width = width;
    job->y0 -= first * is.mcu_height;
    job->y1 -= first * is.mcu_height;
    job->x0 -= left * is.group;
    job->x1 -= left * is.group;
    return OK;
}

static int jpeg_job(Scratch *s, const Batch *batch, const Job *whole) {
    Job cut = *whole, *job = &cut;
    if (cut_out(s, batch, job) != OK) {
        return NO_MEMORY;
    }
    struct jpeg_decompress_struct info;
    struct jpeg_progress_mgr progress;
    Errors errors;
    Window window;
    int verdict;
    memset(&info, 0, sizeof info);
    memset(&progress, 0, sizeof progress);
    info.err = jpeg_std_error(&errors.base);
    errors.base.error_exit = fail;
    errors.base.emit_message = warn;
    errors.base.output_message = quiet;
    progress.progress_monitor = watch_scans;
    if (setjmp(errors.back)) {
        verdict = errors.base.msg_code == JERR_OUT_OF_MEMORY ? NO_MEMORY : FALLBACK;
    } else {
        /* A new one each time: tables of one picture would serve another that lacks them. */
        jpeg_create_decompress(&info);
        info.progress = &progress;
        verdict = jpeg_window(&info, s, batch, job, &window);
    }
    jpeg_destroy_decompress(&info);
    return verdict != OK ? verdict : resample(s, batch, job, s->pixels, &window);
}

/* WebP ---------------------------------------------------------------------------------------------------------------- */

static int webp_job(Scratch *s, const Batch *batch, const Job *job) {
    WebPDecoderConfig config;
    if (batch->channels != 3) {
        return FALLBACK;
    }
    if (!WebPInitDecoderConfig(&config)) {
        return FALLBACK;
    }
    VP8StatusCode status = WebPGetFeatures(job->data, job->size, &config.input);
    if (status != VP8_STATUS_OK || config.input.has_alpha || config.input.has_animation) {
        return FALLBACK;
    }
    if (job->size > 20 && memcmp(job->data + 12, "VP8X", 4) == 0 &&
        (job->data[20] & (WEBP_EXIF | (batch->refuse_icc ? WEBP_ICC : 0)))) {
        return FALLBACK;
    }
    if (config.input.width != job->width || config.input.height != job->height) {
        return SIZE_MISMATCH;
    }
    double reach_x = fmax(1.0, (job->x1 - job->x0) / batch->width), reach_y = fmax(1.0, (job->y1 - job->y0) / batch->height);
    /* Even, as libwebp wants it, and with the neighbours that its chroma interpolation sees. */
    int left = ((int)floor(job->x0 - reach_x) - MARGIN) & ~1, top = ((int)floor(job->y0 - reach_y) - MARGIN) & ~1;
    int right = (int)ceil(job->x1 + reach_x) + MARGIN, bottom = (int)ceil(job->y1 + reach_y) + MARGIN;
    left = left < 0 ? 0 : left;
    top = top < 0 ? 0 : top;
    right = right > job->width ? job->width : right;
    bottom = bottom > job->height ? job->height : bottom;
    int columns = right - left, lines = bottom - top;
    size_t pitch = (size_t)columns * 3;
    GROW(s->pixels, s->pixels_capacity, pitch * (size_t)lines + 64);
    config.options.use_cropping = left > 0 || top > 0 || right < job->width || bottom < job->height;
    config.options.crop_left = left;
    config.options.crop_top = top;
    config.options.crop_width = columns;
    config.options.crop_height = lines;
    config.output.colorspace = MODE_RGB;
    config.output.is_external_memory = 1;
    config.output.u.RGBA.rgba = s->pixels;
    config.output.u.RGBA.stride = (int)pitch;
    config.output.u.RGBA.size = pitch * (size_t)lines;
    status = WebPDecode(job->data, job->size, &config);
    WebPFreeDecBuffer(&config.output);
    if (status != VP8_STATUS_OK) {
        return status == VP8_STATUS_OUT_OF_MEMORY ? NO_MEMORY : FALLBACK;
    }
    Window window = {pitch, columns, lines, job->x0 - left, job->y0 - top, job->x1 - left, job->y1 - top};
    return resample(s, batch, job, s->pixels, &window);
}

/* A batch ------------------------------------------------------------------------------------------------------------- */

static void one_picture(Scratch *scratch, const Batch *batch, Job *job) {
    if (job->codec == JPEG) {
        *job->status = jpeg_job(scratch, batch, job);
    } else if (job->codec == WEBP) {
        *job->status = webp_job(scratch, batch, job);
    } else {
        *job->status = FALLBACK;
    }
}

static double now(void) {
    struct timespec found;
    clock_gettime(CLOCK_MONOTONIC, &found);
    return (double)found.tv_sec + 1e-9 * (double)found.tv_nsec;
}

/* Threads of the process that decode pictures, kept. Batches wait in the order of their turns: a thread that is free takes the next picture
   of the first batch that has any left, so that what is needed first is ready first, and no more threads work than were asked for, however
   many batches are under way. A forked child starts its own. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    Batch *first;
    int started, active, asleep;
    const volatile int64_t *width; /* somebody else's limit of the threads at a time; 0 for none */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

/* The batch to work on, or NULL. */
static Batch *next_batch(void) {
    int most = 0;
    for (Batch *batch = pool.first; batch != NULL; batch = batch->next) {
        most = batch->threads > most ? batch->threads : most;
    }
    int64_t width = pool.width == NULL ? 0 : *pool.width;
    if (width > 0 && width < most) {
        most = (int)width;
    }
    Batch *batch = pool.active < most ? pool.first : NULL;
    while (batch != NULL && (batch->taken == batch->count || batch->active == batch->threads)) {
        batch = batch->next;
    }
    return batch;
}

static void *work(void *unused) {
    (void)unused;
    Scratch scratch;
    memset(&scratch, 0, sizeof scratch);
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        Batch *batch = next_batch();
        if (batch == NULL) {
            if (scratch.pixels_capacity + scratch.rows_capacity + scratch.cut_capacity > KEPT_BYTES) {
                release(&scratch);
                memset(&scratch, 0, sizeof scratch);
            }
            pool.asleep++;
            pthread_cond_wait(&pool.wake, &pool.lock);
            pool.asleep--;
            continue;
        }
        Job *job = &batch->jobs[batch->taken++];
        batch->active++;
        pool.active++;
        if (pool.asleep && next_batch() != NULL) {
            pthread_cond_signal(&pool.wake); /* the width has grown */
        }
        pthread_mutex_unlock(&pool.lock);
        double began = now();
        one_picture(&scratch, batch, job);
        double seconds = now() - began;
        pthread_mutex_lock(&pool.lock);
        batch->seconds += seconds;
        batch->active--;
        pool.active--;
        if (++batch->done == batch->count) {
            /* Who waits may take it apart as soon as the lock is free. */
            pthread_cond_signal(&batch->over);
        }
    }
    return NULL;
}

static void forget_pool(void) {
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pool.first = NULL;
    pool.started = pool.active = pool.asleep = 0;
}

/* At least `count` threads, or as many as the system gives. They take no signals but their own faults. */
static void start_threads(int count) {
    sigset_t all, before;
    pthread_attr_t detached;
    pthread_t thread;
    if (pool.started >= count || pthread_attr_init(&detached) != 0) {
        return;
    }
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.started < count && pthread_create(&thread, &detached, work, NULL) == 0) {
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
}

static void run_here(Batch *batch) {
    Scratch scratch;
    double began = now();
    memset(&scratch, 0, sizeof scratch);
    for (Py_ssize_t number = 0; number < batch->count; number++) {
        one_picture(&scratch, batch, &batch->jobs[number]);
    }
    release(&scratch);
    batch->seconds = now() - began;
}

static void run_batch(Batch *batch) {
    batch->threads = batch->threads > MOST_THREADS ? MOST_THREADS : batch->threads;
    if (batch->count == 0 || batch->threads < 1) {
        run_here(batch);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    start_threads(batch->threads);
    if (pool.started == 0) {
        pthread_mutex_unlock(&pool.lock);
        run_here(batch);
        return;
    }
    pthread_cond_init(&batch->over, NULL);
    Batch **at = &pool.first;
    while (*at != NULL && (*at)->turn <= batch->turn) {
        at = &(*at)->next;
    }
    batch->next = *at;
    *at = batch;
    pthread_cond_broadcast(&pool.wake);
    while (batch->done < batch->count) {
        pthread_cond_wait(&batch->over, &pool.lock);
    }
    for (at = &pool.first; *at != batch; at = &(*at)->next) {
    }
    *at = batch->next;
    pthread_mutex_unlock(&pool.lock);
    pthread_cond_destroy(&batch->over);
}

static int get_view(PyObject *object, Py_buffer *view, Py_ssize_t bytes, int writable, const char *what) {
    if (PyObject_GetBuffer(object, view, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) != 0) {
        return -1;
    }
    if (bytes >= 0 && view->len != bytes) {
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes, not %zd", what, view->len, bytes);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

/* decode(payloads, codecs, sizes, boxes, flips, out, places, shape, refuse_icc, threads, turn, status) -> seconds of all threads. 0 threads: the caller itself. */
static PyObject *decode(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *payloads, *objects[7];
    int height, width, channels, refuse_icc, threads;
    long long turn;
    if (!PyArg_ParseTuple(args, "OOOOOOO(iii)iiLO", &payloads, &objects[0], &objects[1], &objects[2], &objects[3], &objects[4],
                          &objects[5], &height, &width, &channels, &refuse_icc, &threads, &turn, &objects[6])) {
        return NULL;
    }
    /* Payloads are a sequence of buffers, or a tuple (values, starts, stops): parts of one buffer. */
    int packed = PyTuple_Check(payloads);
    PyObject *list = NULL, *result = NULL, *values, *bounds[2];
    Py_buffer views[7], of_packed[3], *held_payloads = NULL;
    Py_ssize_t count, held = 0;
    Job *jobs = NULL;
    int got = 0, got_packed = 0;
    if (packed) {
        if (!PyArg_ParseTuple(payloads, "OOO", &values, &bounds[0], &bounds[1])) {
            return NULL;
        }
        if (get_view(values, &of_packed[0], -1, 0, "payloads") != 0) {
            return NULL;
        }
        got_packed = 1;
        for (; got_packed < 3; got_packed++) {
            Py_ssize_t expected = got_packed == 1 ? -1 : of_packed[1].len;
            if (get_view(bounds[got_packed - 1], &of_packed[got_packed], expected, 0, "bounds of payloads") != 0) {
                goto end;
            }
        }
        count = of_packed[1].len / 8;
    } else {
        list = PySequence_Fast(payloads, "payloads must be a sequence");
        if (list == NULL) {
            return NULL;
        }
        count = PySequence_Fast_GET_SIZE(list);
    }
    if (height < 1 || width < 1 || (channels != 1 && channels != 3) || height > 1 << 16 || width > 1 << 16) {
        PyErr_SetString(PyExc_ValueError, "no such output shape");
        goto end;
    }
    const Py_ssize_t expected[7] = {count, count * 16, count * 32, count, -1, count * 8, count * 4};
    const char *names[7] = {"codecs", "sizes", "boxes", "flips", "out", "places", "status"};
    for (; got < 7; got++) {
        if (get_view(objects[got], &views[got], expected[got], got == 4 || got == 6, names[got]) != 0) {
            goto end;
        }
    }
    size_t row_bytes = (size_t)height * (size_t)width * (size_t)channels;
    jobs = PyMem_Calloc((size_t)(count ? count : 1), sizeof(Job));
    held_payloads = PyMem_Calloc((size_t)(count ? count : 1), sizeof(Py_buffer));
    if (jobs == NULL || held_payloads == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (; held < count; held++) {
        const int64_t *size = (const int64_t *)views[1].buf + 2 * held;
        const double *box = (const double *)views[2].buf + 4 * held;
        int64_t place = ((const int64_t *)views[5].buf)[held];
        Job *job = &jobs[held];
        if (place < 0 || (size_t)place >= (size_t)views[4].len / row_bytes) {
            PyErr_Format(PyExc_IndexError, "place %lld is outside the output", (long long)place);
            goto end;
        }
        if (size[0] < 1 || size[1] < 1 || size[0] > 1 << 20 || size[1] > 1 << 20 || !(box[0] >= 0 && box[1] >= 0) ||
            !(box[2] > box[0] && box[3] > box[1] && box[2] <= (double)size[0] && box[3] <= (double)size[1])) {
            PyErr_Format(PyExc_ValueError, "picture %zd: a rectangle outside its %lld x %lld pixels", held, (long long)size[0],
                         (long long)size[1]);
            goto end;
        }
        const uint8_t *data;
        Py_ssize_t bytes;
        if (packed) {
            int64_t start = ((const int64_t *)of_packed[1].buf)[held], stop = ((const int64_t *)of_packed[2].buf)[held];
            if (start < 0 || stop < start || stop > of_packed[0].len) {
                PyErr_Format(PyExc_IndexError, "payload %zd, %lld to %lld, is outside its %zd bytes", held, (long long)start,
                             (long long)stop, of_packed[0].len);
                goto end;
            }
            data = (const uint8_t *)of_packed[0].buf + start;
            bytes = (Py_ssize_t)(stop - start);
        } else {
            if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(list, held), &held_payloads[held], PyBUF_CONTIG_RO) != 0) {
                goto end;
            }
            data = held_payloads[held].buf;
            bytes = held_payloads[held].len;
        }
        *job = (Job){.data = data,
                     .size = (size_t)bytes,
                     .codec = ((const uint8_t *)views[0].buf)[held],
                     .width = (int)size[0],
                     .height = (int)size[1],
                     .flip = ((const uint8_t *)views[3].buf)[held],
                     .x0 = box[0],
                     .y0 = box[1],
                     .x1 = box[2],
                     .y1 = box[3],
                     .out = (uint8_t *)views[4].buf + (size_t)place * row_bytes,
                     .status = (int32_t *)views[6].buf + held};
    }
    Batch batch = {.jobs = jobs, .count = count, .height = height, .width = width, .channels = channels, .refuse_icc = refuse_icc,
                   .threads = threads, .turn = turn};
    Py_BEGIN_ALLOW_THREADS
    run_batch(&batch);
    Py_END_ALLOW_THREADS
    result = PyFloat_FromDouble(batch.seconds);
end:
    for (Py_ssize_t i = 0; i < held && !packed; i++) {
        PyBuffer_Release(&held_payloads[i]);
    }
    for (int i = 0; i < got_packed; i++) {
        PyBuffer_Release(&of_packed[i]);
    }
    PyMem_Free(held_payloads);
    PyMem_Free(jobs);
    for (int i = 0; i < got; i++) {
        PyBuffer_Release(&views[i]);
    }
    Py_XDECREF(list);
    return result;
}

#define TEXT(x) #x
#define AS_TEXT(x) TEXT(x)

static PyObject *report(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    int webp = WebPGetDecoderVersion();
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", webp >> 16, webp >> 8 & 255, webp & 255);
#ifdef LIBJPEG_TURBO_VERSION
    const char *jpeg = AS_TEXT(LIBJPEG_TURBO_VERSION);
#else
    const char *jpeg = AS_TEXT(JPEG_LIB_VERSION);
#endif
    return Py_BuildValue("{s:s,s:s,s:s}", "libjpeg", jpeg, "libwebp", version, "simd", has_avx2 ? "avx2" : "none");
}

/* Of a buffer of eight bytes, kept for good: its number limits the threads that decode at a time. */
static PyObject *watch_width(PyObject *module, PyObject *buffer) {
    static Py_buffer kept;
    Py_buffer view;
    (void)module;
    if (get_view(buffer, &view, 8, 1, "width") != 0) {
        return NULL;
    }
    pthread_mutex_lock(&pool.lock);
    if (pool.width != NULL) {
        pool.width = NULL;
        PyBuffer_Release(&kept);
    }
    kept = view;
    pool.width = view.buf;
    pthread_mutex_unlock(&pool.lock);
    Py_RETURN_NONE;
}

static PyObject *use_simd(PyObject *module, PyObject *wanted) {
    (void)module;
#if X86
    has_avx2 = PyObject_IsTrue(wanted) == 1 && __builtin_cpu_supports("avx2");
#else
    (void)wanted;
#endif
    return PyBool_FromLong(has_avx2);
}

static PyMethodDef methods[] = {
    {"decode", decode, METH_VARARGS, "Decode, crop and resize a batch."},
    {"watch_width", watch_width, METH_O, "Let a number of eight bytes limit the threads that decode at a time; 0: as many as calls ask for."},
    {"report", report, METH_NOARGS, "Libraries and instructions used."},
    {"use_simd", use_simd, METH_O, "Use vector instructions where there are some, or not; gives whether they are used."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_pixels", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__pixels(void) {
    static int watched = 0;
#if X86
    has_avx2 = __builtin_cpu_supports("avx2");
#endif
    if (!watched && pthread_atfork(NULL, NULL, forget_pool) != 0) {
        return PyErr_NoMemory();
    }
    watched = 1;
    return PyModule_Create(&definition);
}
