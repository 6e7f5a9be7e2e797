{{/* The release's name is part of every object's name. 48 characters leave room for what is appended. */}}
{{- define "blink-dpu.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- $name | trunc 48 | trimSuffix "-" -}}
{{- end -}}

{{- define "blink-dpu.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "blink-dpu.labels" -}}
{{ include "blink-dpu.selector" . }}
app.kubernetes.io/component: front-end
app.kubernetes.io/part-of: blink
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end -}}

{{/* Ours first: what is handed in goes before it, and nothing is there twice. */}}
{{- define "blink-dpu.podLabels" -}}
{{- $ours := include "blink-dpu.labels" . | fromYaml -}}
{{- $_ := set $ours "llm-d.ai/engine-type" "blink" -}}
{{- /* The framework's label comes among the labels; by hand it is made of serviceID. */ -}}
{{- with .Values.serviceID }}{{ $_ := set $ours "svc.dpu.nvidia.com/service" . }}{{ end -}}
{{- toYaml (mergeOverwrite $ours .Values.serviceDaemonSet.labels (include "blink-dpu.selector" . | fromYaml)) -}}
{{- end -}}

{{- define "blink-dpu.podAnnotations" -}}
{{- toYaml (mergeOverwrite (dict "kubectl.kubernetes.io/default-container" "blink-dpu") .Values.serviceDaemonSet.annotations) -}}
{{- end -}}

{{- define "blink-dpu.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "blink-dpu.controlSecret" -}}
{{- .Values.runtime.tls.secretName | default (printf "%s-control" (include "blink-dpu.fullname" .)) -}}
{{- end -}}
{{- define "blink-dpu.httpsSecret" -}}
{{- .Values.https.secretName | default (printf "%s-https" (include "blink-dpu.fullname" .)) -}}
{{- end -}}
{{- define "blink-dpu.keysSecret" -}}
{{- .Values.apiKeys.secretName | default (printf "%s-keys" (include "blink-dpu.fullname" .)) -}}
{{- end -}}

{{- define "blink-dpu.args" -}}
{{- range .Values.runtime.addresses }}
- --runtime
- {{ . | quote }}
{{- end }}
- --name
- $(NODE_NAME)
{{- with .Values.runtime }}
{{- if .tls.enabled }}
- --runtime-ca
- /etc/blink/control/ca.crt
- --runtime-cert
- /etc/blink/control/tls.crt
- --runtime-key
- /etc/blink/control/tls.key
{{- if .serverName }}
- --runtime-server-name
- {{ .serverName | quote }}
{{- end }}
{{- else }}
- --runtime-insecure
{{- end }}
{{- end }}
- --transport
- {{ .Values.transport }}
- --rdma-address
- {{ ternary "@link" .Values.rdma.address (ne .Values.rdma.interface "") | quote }}
{{- with .Values.rdma.device }}
- --rdma-device
- {{ . | quote }}
{{- end }}
- --https
- {{ printf "0.0.0.0:%v" .Values.https.port | quote }}
- --http
- {{ ternary (printf "0.0.0.0:%v" .Values.plainHttp.port) "off" .Values.plainHttp.enabled | quote }}
- --data-dir
- /tmp/blink
- --tls-min-version
- {{ .Values.https.minVersion | quote }}
{{- if not .Values.https.selfSigned }}
- --tls-cert
- /etc/blink/https/tls.crt
- --tls-key
- /etc/blink/https/tls.key
{{- end }}
{{- if .Values.https.clientCaSecret.name }}
- --tls-client-ca
- {{ printf "/etc/blink/client-ca/%s" .Values.https.clientCaSecret.key | quote }}
{{- end }}
{{- if not .Values.apiKeys.open }}
- --api-keys
- {{ printf "/etc/blink/keys/%s" .Values.apiKeys.key | quote }}
{{- end }}
{{- if .Values.openMetrics }}
- --open-metrics
{{- end }}
{{- with .Values.service }}
- --workers
- {{ .workers | quote }}
- --queue-depth
- {{ .queueDepth | int | quote }}
- --device-timeout
- {{ .deviceTimeout | quote }}
- --grace
- {{ .grace | quote }}
- --unready
- {{ .unready | quote }}
- --max-connections
- {{ .maxConnections | int | quote }}
- --max-body-bytes
- {{ .maxBodyBytes | int | quote }}
- --tool-parser
- {{ .toolParser }}
- --log-level
- {{ .logLevel }}
{{- if not .accessLog }}
- --no-access-log
{{- end }}
{{- range .extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Probes have no certificate to show: where clients need one, they go to the plain port. */}}
{{- define "blink-dpu.probe" -}}
httpGet:
  path: {{ .path }}
  {{- if .root.Values.https.clientCaSecret.name }}
  port: http
  scheme: HTTP
  {{- else }}
  port: https
  scheme: HTTPS
  {{- end }}
{{- end -}}
