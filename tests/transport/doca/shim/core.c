// Devices, progress engines, contexts and tasks.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "shim.h"

#ifndef SHIM_VERSION
#define SHIM_VERSION "3.3.0109"
#endif

static const struct doca_devinfo kDevices[] = {
    {"mlx5_0", "p0", "0000:03:00.0", 0, 1},
    {"mlx5_2", "enp3s0f0s0", "0000:03:00.1", 1, 2},
    {"mlx5_3", "enp3s0f1s0", "0000:03:00.2", 1, 3},
};
enum { kDeviceCount = 3 };

void shim_trace(const char* format, ...) {
  const char* path = getenv("DOCA_SHIM_TRACE");
  if (path == NULL) return;
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  int size = vsnprintf(line, sizeof(line) - 1, format, arguments);
  va_end(arguments);
  line[size++] = '\n';
  int descriptor = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor < 0 || write(descriptor, line, size) != size) shim_abort("no trace");
  close(descriptor);
}

doca_error_t shim_fault(const char* function) {
  const char* wanted = getenv("DOCA_SHIM_FAIL");
  size_t size = strlen(function);
  if (wanted == NULL || strncmp(wanted, function, size) != 0 || wanted[size] != '=') return SUCCESS;
  return atoi(wanted + size + 1);
}

void shim_abort(const char* what) {
  fprintf(stderr, "doca shim: %s\n", what);
  abort();
}

uint64_t shim_random(void) {
  uint64_t drawn = 0;
  if (getrandom(&drawn, sizeof(drawn), 0) != sizeof(drawn)) shim_abort("no random numbers");
  return drawn | 1;
}

int shim_share(struct shared_page* page) {
  snprintf(page->name, sizeof(page->name), "/doca-shim-%016llx", (unsigned long long)shim_random());
  page->descriptor = shm_open(page->name, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (page->descriptor < 0 || ftruncate(page->descriptor, sizeof(struct page)) != 0) return -1;
  if (flock(page->descriptor, LOCK_EX) != 0) return -1;
  page->page = mmap(NULL, sizeof(struct page), PROT_READ | PROT_WRITE, MAP_SHARED, page->descriptor, 0);
  return page->page == MAP_FAILED ? -1 : 0;
}

int shim_find(struct shared_page* page, const char* name) {
  page->page = NULL;
  page->descriptor = shm_open(name, O_RDWR, 0);
  if (page->descriptor < 0) return -1;
  page->page = mmap(NULL, sizeof(struct page), PROT_READ | PROT_WRITE, MAP_SHARED, page->descriptor, 0);
  return page->page == MAP_FAILED ? -1 : 0;
}

int shim_owner_lives(const struct shared_page* page) {
  if (page->page == NULL) return 0;
  if (flock(page->descriptor, LOCK_SH | LOCK_NB) != 0) return errno == EWOULDBLOCK;
  flock(page->descriptor, LOCK_UN);
  return 0;
}

void shim_leave(struct shared_page* page, int remove) {
  if (page->page == NULL) return;
  if (remove) {
    __atomic_store_n(&page->page->key, 0, __ATOMIC_SEQ_CST);
    shm_unlink(page->name);
  }
  munmap(page->page, sizeof(struct page));
  close(page->descriptor);
  page->page = NULL;
}

const char* doca_version_runtime(void) { return SHIM_VERSION; }

const char* doca_error_get_name(doca_error_t error) {
  switch (error) {
    case SUCCESS:
      return "DOCA_SUCCESS";
    case NOT_PERMITTED:
      return "DOCA_ERROR_NOT_PERMITTED";
    case IN_USE:
      return "DOCA_ERROR_IN_USE";
    case IO_FAILED:
      return "DOCA_ERROR_IO_FAILED";
    case BAD_STATE:
      return "DOCA_ERROR_BAD_STATE";
    default:
      return "DOCA_ERROR_OTHER";
  }
}

const char* doca_error_get_descr(doca_error_t error) {
  return error == IO_FAILED ? "Input/Output Operation Failed" : "described by the shim";
}

doca_error_t doca_devinfo_create_list(struct doca_devinfo*** list, uint32_t* count) {
  ENTER("doca_devinfo_create_list");
  *list = calloc(kDeviceCount, sizeof(**list));
  for (int i = 0; i < kDeviceCount; ++i) (*list)[i] = (struct doca_devinfo*)&kDevices[i];
  *count = kDeviceCount;
  return SUCCESS;
}

doca_error_t doca_devinfo_destroy_list(struct doca_devinfo** list) {
  ENTER("doca_devinfo_destroy_list");
  free(list);
  return SUCCESS;
}

static doca_error_t copy_name(const char* name, char* to, uint32_t size) {
  if (strlen(name) >= size) return INVALID_VALUE;
  strcpy(to, name);
  return SUCCESS;
}

doca_error_t doca_devinfo_get_ibdev_name(const struct doca_devinfo* info, char* name, uint32_t size) {
  return size < 64 ? INVALID_VALUE : copy_name(info->ibdev, name, size);
}

doca_error_t doca_devinfo_get_iface_name(const struct doca_devinfo* info, char* name, uint32_t size) {
  return size < 256 ? INVALID_VALUE : copy_name(info->iface, name, size);
}

doca_error_t doca_devinfo_get_pci_addr_str(const struct doca_devinfo* info, char* name) {
  return copy_name(info->pci, name, 13);
}

doca_error_t doca_dev_open(struct doca_devinfo* info, struct doca_dev** dev) {
  ENTER("doca_dev_open %s", info->ibdev);
  *dev = calloc(1, sizeof(**dev));
  (*dev)->info = info;
  (*dev)->domain = shim_random();
  return SUCCESS;
}

doca_error_t doca_dev_close(struct doca_dev* dev) {
  ENTER("doca_dev_close");
  if (dev->users > 0) return IN_USE;
  free(dev);
  return SUCCESS;
}

doca_error_t doca_pe_create(struct doca_pe** pe) {
  ENTER("doca_pe_create");
  *pe = calloc(1, sizeof(**pe));
  pthread_mutex_init(&(*pe)->lock, NULL);
  (*pe)->notify = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return SUCCESS;
}

doca_error_t doca_pe_destroy(struct doca_pe* pe) {
  ENTER("doca_pe_destroy");
  if (pe->contexts > 0 || pe->first != NULL) return IN_USE;
  close(pe->notify);
  free(pe);
  return SUCCESS;
}

static int tells_once(void) { return getenv("DOCA_SHIM_EDGE") != NULL; }

static void ring(struct doca_pe* pe) {
  if (pe->armed && eventfd_write(pe->notify, 1) != 0) shim_abort("no notification");
  if (tells_once()) pe->armed = 0;
}

void shim_post(struct doca_pe* pe, void (*run)(void*, int), void* subject, int detail) {
  struct event* event = calloc(1, sizeof(*event));
  *event = (struct event){run, subject, detail, NULL};
  pthread_mutex_lock(&pe->lock);
  if (pe->last != NULL) {
    pe->last->next = event;
  } else {
    pe->first = event;
  }
  pe->last = event;
  ring(pe);
  pthread_mutex_unlock(&pe->lock);
}

uint8_t doca_pe_progress(struct doca_pe* pe) {
  pthread_mutex_lock(&pe->lock);
  struct event* event = pe->first;
  if (event != NULL) {
    pe->first = event->next;
    if (pe->first == NULL) pe->last = NULL;
  }
  pthread_mutex_unlock(&pe->lock);
  if (event == NULL) return 0;
  event->run(event->subject, event->detail);
  free(event);
  return 1;
}

doca_error_t doca_pe_connect_ctx(struct doca_pe* pe, struct doca_ctx* ctx) {
  ENTER("doca_pe_connect_ctx");
  if (ctx->state != IDLE || ctx->pe != NULL) return BAD_STATE;
  ctx->pe = pe;
  ++pe->contexts;
  return SUCCESS;
}

doca_error_t doca_pe_get_notification_handle(const struct doca_pe* pe, int* handle) {
  ENTER("doca_pe_get_notification_handle");
  *handle = pe->notify;
  return SUCCESS;
}

doca_error_t doca_pe_request_notification(struct doca_pe* pe) {
  pthread_mutex_lock(&pe->lock);
  pe->armed = 1;
  if (pe->first != NULL && !tells_once()) ring(pe);
  pthread_mutex_unlock(&pe->lock);
  return SUCCESS;
}

doca_error_t doca_pe_clear_notification(struct doca_pe* pe, int handle) {
  if (handle != pe->notify) return INVALID_VALUE;
  eventfd_t count;
  pthread_mutex_lock(&pe->lock);
  pe->armed = 0;
  if (eventfd_read(pe->notify, &count) != 0) shim_abort("a notification was cleared that had not come");
  pthread_mutex_unlock(&pe->lock);
  return SUCCESS;
}

doca_error_t doca_ctx_start(struct doca_ctx* ctx) {
  ENTER("doca_ctx_start");
  if (ctx->state != IDLE || ctx->pe == NULL) return BAD_STATE;
  return ctx->start(ctx);
}

static void become_idle(void* subject, int detail) {
  if (getenv("DOCA_SHIM_BUSY") != NULL) {
    shim_post(((struct doca_ctx*)subject)->pe, become_idle, subject, detail);
    return;
  }
  ((struct doca_ctx*)subject)->state = IDLE;
  shim_trace("idle");
}

void shim_maybe_idle(struct doca_ctx* ctx) {
  if (ctx->state == STOPPING && ctx->in_flight == 0 && ctx->tasks == 0) shim_post(ctx->pe, become_idle, ctx, 0);
}

doca_error_t doca_ctx_stop(struct doca_ctx* ctx) {
  ENTER("doca_ctx_stop in_flight=%d tasks=%d", ctx->in_flight, ctx->tasks);
  if (ctx->state != RUNNING && ctx->state != STARTING) return BAD_STATE;
  ctx->state = STOPPING;
  ctx->stop(ctx);
  shim_maybe_idle(ctx);
  return IN_PROGRESS;
}

doca_error_t doca_ctx_get_state(const struct doca_ctx* ctx, int* state) {
  *state = ctx->state;
  return SUCCESS;
}

doca_error_t doca_ctx_set_user_data(struct doca_ctx* ctx, union doca_data data) {
  ENTER("doca_ctx_set_user_data %llu", (unsigned long long)data.u64);
  ctx->user_data = data;
  return SUCCESS;
}

doca_error_t doca_task_submit(struct doca_task* task) {
  ENTER("doca_task_submit %s %llu", task->is_read ? "read" : "write", (unsigned long long)task->user_data.u64);
  if (task->in_flight) shim_abort("a task was submitted twice");
  if (task->ctx->state != RUNNING) return BAD_STATE;
  task->in_flight = 1;
  ++task->ctx->in_flight;
  return task->ctx->submit(task);
}

void doca_task_free(struct doca_task* task) {
  if (task->in_flight) shim_abort("a task was freed while under way");
  --task->ctx->tasks;
  shim_maybe_idle(task->ctx);
  free(task);
}

doca_error_t doca_task_get_status(const struct doca_task* task) { return task->status; }
