/* Far links between network namespaces: a TUN device in each, and one process that holds every packet.
 *
 *     relay INTERFACE NAMESPACE...
 *
 * Host i has the address 10.213.0.(i + 1) and an uplink and a downlink of its own. A packet leaves the uplink's queue
 * at the link's rate, is under way for the delay, and then passes the receiver's downlink at the same rate. Of a queue
 * that is longer than its limit the newest packet is dropped; others are lost by chance.
 *
 * Lines on standard input, "RATE DELAY QUEUE LOSS" in bytes per second (0: no limit), nanoseconds, nanoseconds of queue
 * and lost packets per million, set all links; each is answered by what has happened so far, as JSON. At the end of the
 * input the relay ends.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MAX_HOSTS = 64, MAX_PACKET = 65536, AT_ONCE = 32 };

typedef struct packet {
    struct packet *next;
    int64_t due;
    int destination;
    int length;
    unsigned char bytes[];
} packet;

typedef struct {
    packet *first, *last;
    int64_t free_at; /* when the link has sent all that waits for it */
} queue;

static struct {
    int64_t rate, delay, limit, loss;
} link_;
static struct {
    int64_t packets, dropped, lost, latest;
} count;
static queue flying[MAX_HOSTS], landing[MAX_HOSTS]; /* by source; by destination */
static int device[MAX_HOSTS], num_hosts;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void enter(const char *path) {
    int space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET)) fail(path);
    close(space);
}

/* A device of this name in a namespace; the file stays valid when this process leaves it. */
static int open_device(const char *namespace, const char *name) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    enter(path);
    int file = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) fail("/dev/net/tun");
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (ioctl(file, TUNSETIFF, &request)) fail("TUNSETIFF");
    snprintf(path, sizeof path, "/proc/%d/ns/net", getppid());
    enter(path);
    return file;
}

static uint32_t chance(void) { /* xorshift, the same packets in every run of the same traffic */
    static uint32_t x = 2463534242u;
    x ^= x << 13, x ^= x >> 17, x ^= x << 5;
    return x;
}

/* Behind what waits for the link; false where the queue is full. */
static int join(queue *q, packet *p, int64_t from, int64_t delay) {
    int64_t start = q->free_at > from ? q->free_at : from;
    if (start - from > link_.limit) return 0;
    q->free_at = start + (link_.rate ? (int64_t)p->length * 1000000000 / link_.rate : 0);
    p->due = q->free_at + delay;
    p->next = NULL;
    if (q->first) q->last->next = p; else q->first = p;
    q->last = p;
    return 1;
}

static packet *leave(queue *q) {
    packet *p = q->first;
    q->first = p->next;
    return p;
}

static void drop(packet *p) {
    count.dropped++;
    free(p);
}

static void take(int source) {
    static unsigned char bytes[MAX_PACKET];
    for (int i = 0; i < AT_ONCE; i++) {
        ssize_t length = read(device[source], bytes, sizeof bytes);
        if (length <= 0) return;
        int destination = length >= 20 && bytes[0] >> 4 == 4 ? bytes[19] - 1 : -1;
        if (destination < 0 || destination >= num_hosts || bytes[16] != 10) continue; /* IPv6 and multicast */
        count.packets++;
        if (chance() % 1000000 < link_.loss) {
            count.lost++;
            continue;
        }
        packet *p = malloc(sizeof *p + length);
        if (!p) fail("malloc");
        p->destination = destination, p->length = length;
        memcpy(p->bytes, bytes, length);
        if (!join(&flying[source], p, now(), link_.delay)) drop(p);
    }
}

/* Of all queues the one whose first packet is due first; NULL where all are empty. */
static queue *earliest(queue *queues) {
    queue *found = NULL;
    for (int i = 0; i < num_hosts; i++)
        if (queues[i].first && (!found || queues[i].first->due < found->first->due)) found = &queues[i];
    return found;
}

static void move_due(void) {
    queue *q;
    while ((q = earliest(flying)) && q->first->due <= now()) {
        packet *p = leave(q);
        if (!join(&landing[p->destination], p, p->due, 0)) drop(p);
    }
    while ((q = earliest(landing)) && q->first->due <= now()) {
        packet *p = leave(q);
        int64_t late = now() - p->due;
        if (late > count.latest) count.latest = late;
        if (write(device[p->destination], p->bytes, p->length) < 0 && errno != EIO) count.dropped++;
        free(p);
    }
}

static void obey(void) {
    static char line[256];
    static size_t length;
    ssize_t got = read(0, line + length, sizeof line - 1 - length);
    if (got <= 0) exit(0);
    length += got;
    line[length] = 0;
    char *end;
    while ((end = strchr(line, '\n'))) {
        long long rate, delay, limit, loss;
        if (sscanf(line, "%lld %lld %lld %lld", &rate, &delay, &limit, &loss) != 4) exit(1);
        link_.rate = rate, link_.delay = delay, link_.limit = limit, link_.loss = loss;
        printf("{\"packets\": %lld, \"dropped\": %lld, \"lost\": %lld, \"latest_s\": %.6f}\n", (long long)count.packets,
               (long long)count.dropped, (long long)count.lost, count.latest / 1e9);
        fflush(stdout);
        count.latest = 0;
        length -= end + 1 - line;
        memmove(line, end + 1, length + 1);
    }
}

int main(int argc, char **argv) {
    if (argc < 3 || argc > MAX_HOSTS + 2) return 2;
    num_hosts = argc - 2;
    for (int i = 0; i < num_hosts; i++) device[i] = open_device(argv[i + 2], argv[1]);
    prctl(PR_SET_PDEATHSIG, 9);
    prctl(PR_SET_TIMERSLACK, 1);
    struct sched_param priority = {.sched_priority = 1};
    sched_setscheduler(0, SCHED_FIFO, &priority); /* late packets would be the relay's delay; allowed to fail */
    struct pollfd files[MAX_HOSTS + 1];
    for (int i = 0; i < num_hosts; i++) files[i] = (struct pollfd){.fd = device[i], .events = POLLIN};
    files[num_hosts] = (struct pollfd){.fd = 0, .events = POLLIN};
    for (;;) {
        move_due();
        queue *flight = earliest(flying), *land = earliest(landing);
        int64_t due = -1;
        if (flight) due = flight->first->due;
        if (land && (due < 0 || land->first->due < due)) due = land->first->due;
        int64_t left = due < 0 ? 1000000000 : due - now();
        if (left < 0) left = 0;
        struct timespec wait = {left / 1000000000, left % 1000000000};
        if (ppoll(files, num_hosts + 1, &wait, NULL) < 0 && errno != EINTR) fail("ppoll");
        for (int i = 0; i < num_hosts; i++)
            if (files[i].revents & POLLIN) take(i);
        if (files[num_hosts].revents) obey();
    }
}
