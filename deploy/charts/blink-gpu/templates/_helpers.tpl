{{/* The release's name is part of every object's name. 48 characters leave room for what Kubernetes appends. */}}
{{- define "blink-gpu.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- $name | trunc 48 | trimSuffix "-" -}}
{{- end -}}

{{- define "blink-gpu.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "blink-gpu.labels" -}}
{{ include "blink-gpu.selector" . }}
app.kubernetes.io/component: gpu-runtime
app.kubernetes.io/part-of: blink
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end -}}

{{- define "blink-gpu.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "blink-gpu.controlSecret" -}}
{{- .Values.controlPlane.tls.secretName | default (printf "%s-control" (include "blink-gpu.fullname" .)) -}}
{{- end -}}

{{/* The secret of the role reader; empty without one. */}}
{{- define "blink-gpu.readerSecret" -}}
{{- with .Values.controlPlane.tls -}}
{{- if .readerSecretName -}}{{ .readerSecretName }}
{{- else if and .enabled .certManager.enabled -}}{{ include "blink-gpu.fullname" $ }}-reader
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A value as an option, left out where the choice is the program's. */}}
{{- define "blink-gpu.option" -}}
{{- if .value }}
- {{ .name }}
- {{ toString .value | quote }}
{{- end }}
{{- end -}}

{{- define "blink-gpu.args" -}}
- --device
- {{ .Values.device }}
- --listen
- {{ printf "%s:%v" .Values.controlPlane.address .Values.controlPlane.port | quote }}
{{- if .Values.controlPlane.tls.enabled }}
- --tls-cert
- /etc/blink/control/tls.crt
- --tls-key
- /etc/blink/control/tls.key
- --client-ca
- /etc/blink/control/ca.crt
{{- else }}
- --insecure
{{- end }}
- --transport
- {{ .Values.transport }}
- --rdma-address
- {{ ternary "@link" .Values.rdma.address (ne .Values.rdma.interface "") | quote }}
{{- include "blink-gpu.option" (dict "name" "--rdma-device" "value" .Values.rdma.device) }}
{{- include "blink-gpu.option" (dict "name" "--gpu-memory" "value" .Values.rdma.gpuMemory) }}
- --model
- {{ .Values.model.path | quote }}
{{- include "blink-gpu.option" (dict "name" "--name" "value" .Values.model.name) }}
{{- with .Values.runtime }}
{{- include "blink-gpu.option" (dict "name" "--dtype" "value" .dtype) }}
{{- include "blink-gpu.option" (dict "name" "--memory-share" "value" .memoryShare) }}
{{- include "blink-gpu.option" (dict "name" "--kv-tokens" "value" (int .kvTokens)) }}
{{- include "blink-gpu.option" (dict "name" "--token-budget" "value" (int .tokenBudget)) }}
{{- include "blink-gpu.option" (dict "name" "--max-running" "value" (int .maxRunning)) }}
{{- include "blink-gpu.option" (dict "name" "--max-sequences" "value" (int .maxSequences)) }}
{{- include "blink-gpu.option" (dict "name" "--max-model-tokens" "value" (int .maxModelTokens)) }}
{{- include "blink-gpu.option" (dict "name" "--channels" "value" (int .channels)) }}
- --lease-timeout
- {{ toString .leaseTimeout | quote }}
- --grace
- {{ toString .grace | quote }}
{{- range .extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "blink-gpu.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The kubelet asks the pod's address unless the control plane listens on another. */}}
{{- define "blink-gpu.tcp" -}}
port: control
{{- if ne .Values.controlPlane.address "0.0.0.0" }}
host: {{ .Values.controlPlane.address | quote }}
{{- end }}
{{- end -}}
